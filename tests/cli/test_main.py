"""The command line as a whole: help, errors, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from dspark import __version__
from dspark.cli import COMMANDS


def test_help_lists_the_commands_without_loading_torch():
    code = "import sys; from dspark.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert f" {name} " in run.stdout


def test_no_arguments_show_the_help(dspark):
    run = dspark()
    assert run.code == 0
    assert "generate" in run.out


def test_version(dspark):
    assert dspark("--version").out.strip() == __version__


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "generate",
            "--no-speculation --temperature --top-p --top-k --min-p --repetition-penalty --presence-penalty"
            " --frequency-penalty --seed --max-tokens --stop --system --raw --prompts --stdin --target --drafter"
            " --dtype --device --json",
        ),
        ("demo", "--json --temperature --seed --max-tokens --prompts --target --drafter --dtype --device"),
        ("data", "--json --target"),
        ("train", "--json --target"),
    ],
)
def test_every_command_explains_itself(dspark, command, options):
    run = dspark(command, "--help")
    assert run.code == 0
    for option in options.split():
        assert option in run.out


def test_generate_help_teaches_by_example(dspark):
    assert 'dspark generate "Why is the sky blue?"' in dspark("generate", "--help").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generat"], "unknown command 'generat': did you mean `generate`? (see `dspark --help`)"),
        (["zzz"], "unknown command 'zzz': commands are demo, generate, data, train"),
        (["generate", "hi", "--temprature", "1"], "--temperature"),
        (["generate", "hi", "--top-k", "x"], 'Invalid value for --top-k: unable to convert "x" into int'),
        (["generate", "hi", "--dtype", "int3"], "float32"),
        (["generate"], "give one of: a prompt, - (the prompt comes from standard input), --prompts FILE"),
        (["generate", "hi", "--stdin"], "give one of"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "--prompts", "/nowhere/p.jsonl"], "/nowhere/p.jsonl: No such file or directory"),
        (["generate", "hi", "--raw", "--system", "x"], "--system has no place in --raw"),
        (["generate", "hi", "--top-p", "1.5"], "top_p"),
        (["generate", "hi", "--target", "./nowhere", "--no-speculation"], "./nowhere"),
        (["generate", "hi", "--target", "./nowhere"], "--target ./nowhere needs a drafter that was trained for it"),
        (["generate", "hi", "--drafter", "./nowhere"], "--drafter ./nowhere: no such directory"),
        (["demo", "--prompts", "/nowhere/p.jsonl"], "/nowhere/p.jsonl: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(dspark, arguments, message):
    run = dspark(*arguments)
    assert run.code == 2
    assert run.out == ""
    assert run.err.startswith("dspark: ")
    assert message in run.err
    assert run.err.count("\n") == 1

    run = dspark(*arguments, "--json")
    assert run.code == 2
    assert run.err == ""
    assert message in json.loads(run.out)["error"]


def test_of_several_processes_one_writes_the_object(dspark, monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        run = dspark("generate", "--json")
        assert run.code == 2
        assert [bool(run.out), bool(run.err)] == [rank == "0", rank == "1"]


def test_traceback_on_request(dspark, monkeypatch):
    monkeypatch.setenv("DSPARK_TRACEBACK", "1")
    with pytest.raises(ValueError, match="give one of"):
        dspark("generate")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (ValueError("two\nlines"), 2, "dspark: two lines\n"),
        (ValueError(), 2, "dspark: ValueError\n"),
        (OSError("no space"), 2, "dspark: no space\n"),
    ],
)
def test_exit_codes(dspark, monkeypatch, error, code, message):
    def fail() -> None:
        raise error

    monkeypatch.setattr("dspark.cli.generate.generate", fail)
    run = dspark("generate")
    assert run.code == code
    assert run.err == message


def test_a_bug_keeps_its_traceback(dspark, monkeypatch):
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("dspark.cli.generate.generate", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        dspark("generate")


def test_a_closed_pipe_ends_quietly():
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = (
        "import sys; import dspark.cli.generate as command; from dspark.cli import main;"
        "command.generate = lambda: print('much text'); sys.exit(main(['generate']))"
    )
    run = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert run.returncode == 128 + signal.SIGPIPE
    assert run.stderr == ""


def test_a_terminal_without_unicode_still_gets_its_answer():
    code = "import sys; from dspark.cli import main; main(['--version']); print('\\u2603')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.splitlines()[-1] == "?"
