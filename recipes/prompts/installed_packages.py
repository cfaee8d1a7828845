"""Prompts about real code and prose, for `dspark data`: from the functions and texts of this Python installation.

    python recipes/prompts/installed_packages.py prompts/packages.jsonl
    dspark data data/mine --source self=2 --source prompts/packages.jsonl ...

A small target writes user messages that are short and alike; people paste code and text. Functions with a docstring,
and paragraphs of docstrings, of Python's own help and of package descriptions, are put behind a request, such as to
complete, explain, summarise or translate them. The same packages give the same prompts.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics
from textwrap import dedent
from typing import NamedTuple

PACKAGES = ("numpy", "torch", "networkx", "sympy", "mpmath", "pydantic", "fastapi", "jinja2", "rich", "httpx", "typer")
CODE_REQUESTS = {
    "signature": (
        "Complete this Python function. Answer with the whole function.\n\n```python\n{code}\n```",
        "Implement the following function.\n\n```python\n{code}\n```",
        "Write the body of this function:\n\n```python\n{code}\n```\nOnly give me the code.",
        "Here is a function without its body.\n```python\n{code}\n```\nPlease finish it, and show how to call it.",
        "{code}",
    ),
    "function": (
        "Explain what this function does.\n\n```python\n{code}\n```",
        "Write unit tests for this function.\n\n```python\n{code}\n```",
        "Can you make this code simpler?\n```python\n{code}\n```",
        "Add type hints and a docstring:\n\n```python\n{code}\n```",
        "Is there a bug in this code?\n\n{code}",
        "Rewrite this in JavaScript.\n\n```python\n{code}\n```",
    ),
    "description": (
        "Write a Python function called `{name}`. {text}",
        "Write a function that does this: {text}",
        "In Python, how would you implement a function with this description? {text}",
    ),
}
TEXT_REQUESTS = (
    "Summarize the following text in two sentences.\n\n{text}",
    "Rewrite the following text in simple words.\n\n{text}",
    "List the key points of this text.\n\n{text}",
    "What is this about?\n\n{text}",
    "{text}\n\nExplain this to a beginner, with an example.",
    "Write three questions about this text, with their answers.\n\n{text}",
    "Correct and improve the following paragraph:\n\n{text}",
    "Extract all names and technical terms from the text below as a JSON list.\n\n{text}",
    "Translate the following text to {language}.\n\n{text}",
    "Write a short email to a colleague that explains the following.\n\n{text}",
    "Turn this into a short story for children.\n\n{text}",
)
LANGUAGES = ("Spanish", "French", "German", "Italian", "Portuguese")
CODE_CHARACTERS = (60, 900)
TEXT_CHARACTERS = (120, 900)


class Module(NamedTuple):
    """A source file."""

    name: str
    tree: ast.Module
    lines: list[str]


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--prompts", type=int, default=8000, help="at most so many, half of them about code")
    arguments = parser.parse_args()
    modules = list(read_modules(sources()))
    docstrings = (ast.get_docstring(module.tree) or "" for module in modules)
    prompts = []
    for found in (code_prompts(modules), text_prompts([*topics.values(), *descriptions(), *docstrings])):
        kind = list(dict.fromkeys(found))
        random.Random(0).shuffle(kind)
        prompts += kind[: arguments.prompts // 2]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"turns": [prompt]}, ensure_ascii=False) + "\n" for prompt in prompts)
    print(f"{len(prompts)} prompts in {arguments.out}")


def code_prompts(modules: Iterable[Module]) -> Iterator[str]:
    """One request about each function with a docstring."""
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or len(node.body) < 2:
                continue
            summary = paragraph(ast.get_docstring(node) or "")
            if len(summary) < 30:
                continue
            code = dedent("\n".join(module.lines[node.lineno - 1 : node.end_lineno]))
            draw = draws(f"{module.name} {node.name} {code}")
            kind = draw.choices(("signature", "function", "description"), (3, 2, 2))[0]
            request = draw.choice(CODE_REQUESTS[kind])
            if kind == "description":
                text = re.split(r" (?:Args|Arguments|Parameters|Returns)\b", summary)[0]
                yield request.format(name=node.name, text=text)
                continue
            if kind == "signature":
                docstring_end = node.body[0].end_lineno or node.lineno
                code = dedent("\n".join(module.lines[node.lineno - 1 : docstring_end]))
            if CODE_CHARACTERS[0] <= len(code) <= CODE_CHARACTERS[1]:
                yield request.format(code=code)


def text_prompts(texts: Iterable[str]) -> Iterator[str]:
    """One request about each paragraph of prose."""
    for text in texts:
        for part in re.split(r"\n\s*\n", text):
            prose = paragraph(part)
            if TEXT_CHARACTERS[0] <= len(prose) <= TEXT_CHARACTERS[1] and is_prose(prose):
                draw = draws(prose)
                yield draw.choice(TEXT_REQUESTS).format(text=prose, language=draw.choice(LANGUAGES))


def read_modules(paths: Iterable[Path]) -> Iterator[Module]:
    """The modules that can be parsed."""
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            yield Module(path.name, ast.parse(text), text.splitlines())
        except (SyntaxError, ValueError):
            continue  # test data of parsers


def descriptions() -> Iterator[str]:
    """What the installed packages say of themselves, behind the headers of their metadata."""
    for package in distributions():
        yield (package.read_text("METADATA") or "").partition("\n\n")[2]


def sources() -> list[Path]:
    """Source files of the standard library and of `PACKAGES`, without tests."""
    paths = sysconfig.get_paths()
    roots = [(Path(paths["stdlib"]), "site-packages"), *((Path(paths["purelib"]) / name, "") for name in PACKAGES)]
    return sorted(
        path
        for root, left_out in roots
        for path in root.rglob("*.py")
        if not {left_out, "test", "tests", "idlelib"} & set(path.relative_to(root).parts)
    )


def paragraph(text: str) -> str:
    """The first paragraph, as one line."""
    return " ".join(re.split(r"\n\s*\n", text.strip())[0].split())


def is_prose(text: str) -> bool:
    """Whether it is sentences rather than code, tables or lists."""
    letters = sum(character.isalpha() or character == " " for character in text)
    return letters > 0.85 * len(text) and text[0].isupper() and text[-1] in ".!?" and text.isascii()


def draws(text: str) -> random.Random:
    """Randomness that belongs to a text, so that one more package leaves the others' prompts as they are."""
    return random.Random(hashlib.sha256(text.encode()).digest())


if __name__ == "__main__":
    main()
