"""The ``dspark`` command: parses, calls, prints.

Each command lives in a module of its own that is imported only when the command runs, so that ``dspark --help``
does not wait for torch. Exit codes: 0 done, 1 a failure of the program itself, 2 a mistake in what was asked, 130
Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from io import TextIOWrapper

from cyclopts import App
from cyclopts.exceptions import CycloptsError, UnknownCommandError

from dspark import __version__

__all__ = ["build_app", "main"]

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE

TRACEBACK_VARIABLE = "DSPARK_TRACEBACK"

COMMANDS = {
    "demo": "Answer a few real prompts with and without DSpark, side by side, and compare.",
    "generate": "Answer a prompt with the target, sped up by a drafter.",
    "data": "Regenerate training data: prompts answered by the target itself.",
    "train": "Train a drafter for a target on regenerated data.",
    "calibrate": "Make a drafter's confidences probabilities, and show how true they are.",
    "profile": "Measure what a step costs on this hardware, for scheduling by load.",
    "serve": "Serve a target and its drafter to clients of OpenAI's API.",
    "bench": "Measure many requests at once: throughput and speed for each user, by load and policy.",
    "eval": "Measure drafters on prompts: accepted length, acceptance, speed-up, with a report.",
}


def build_app(command: str | None = None) -> App:
    """The command line as a Cyclopts app.

    ``command`` is the one about to run: its own docstring explains it, and a line that needs no import the others.
    """
    app = App(
        name="dspark",
        version=__version__,
        help="""Lossless speculative decoding with DSpark drafters: regenerate data, train a drafter, generate faster.

        A new machine needs nothing but this package: the default target (SmolLM2-135M-Instruct) comes from the package
        index, and a drafter trained for it is inside. Start with `dspark demo`.
        """,
        help_epilogue=f"`dspark COMMAND --help` explains a command; {TRACEBACK_VARIABLE}=1 shows an error's origin.",
        help_format="markdown",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for position, (name, text) in enumerate(COMMANDS.items()):
        app.command(f"dspark.cli.{name}:{name}", help=None if name == command else text, sort_key=position)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` by default) and return its exit code.

    What a user can put right (a bad option, value or file) ends as one line on stderr, or as ``{"error": ...}`` on
    stdout when ``--json`` was asked for. Anything else is a bug and keeps its traceback.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the answer
    try:
        result = build_app(tokens[0] if tokens else None)(tokens, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except UnknownCommandError as error:
        if tokens[0] in COMMANDS:
            return _report(tokens, f"{str(error).strip().rstrip('.')} (see `{_command_name(tokens)} --help`)")
        # Cyclopts would import every command to make its suggestion.
        close = get_close_matches(tokens[0], COMMANDS, n=1)
        known = f"did you mean `{close[0]}`?" if close else f"commands are {', '.join(COMMANDS)}"
        return _report(tokens, f"unknown command {tokens[0]!r}: {known} (see `dspark --help`)")
    except CycloptsError as error:
        return _report(tokens, f"{str(error).strip().rstrip('.')} (see `{_command_name(tokens)} --help`)")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, a closed pager) has gone: say nothing, and let the interpreter's last flush succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        return _report(tokens, _one_line(error))
    return result if isinstance(result, int) else EXIT_OK


def _report(tokens: Sequence[str], message: str) -> int:
    # Of several processes (torchrun) one writes on stdout, so that it holds one object.
    if "--json" in tokens and os.environ.get("RANK", "0") == "0":
        print(json.dumps({"error": message}))
    else:
        print(f"dspark: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


def _command_name(tokens: Sequence[str]) -> str:
    return f"dspark {tokens[0]}" if tokens and tokens[0] in COMMANDS else "dspark"


def _one_line(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
