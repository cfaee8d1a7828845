"""recipes/prompts: prompts made of what is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = '''
class Table:
    def rows(self, first: int) -> list[int]:
        """The numbers of all rows from the first one on.

        More of it.
        """
        return list(range(first, 10))

def _hidden() -> int:
    """A private function that no prompt is made of."""
    return 1

def undocumented(x):
    return x + 1
'''
PROSE = "This paragraph says nothing at all, but it says so in whole sentences. " * 3


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[1] / "recipes" / "prompts" / "installed_packages.py"
    spec = importlib.util.spec_from_file_location("installed_packages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions_with_a_docstring_become_prompts(script: ModuleType, tmp_path: Path) -> None:
    whole, signature, described = False, False, False
    for number in range(30):  # the draw of a kind depends on the file's name
        (path := tmp_path / f"{number}.py").write_text(SOURCE)
        (prompt,) = script.code_prompts(script.read_modules([path]))
        assert "_hidden" not in prompt
        assert "undocumented" not in prompt
        if "def rows(self" in prompt:
            assert 'def rows(self, first: int) -> list[int]:\n    """The numbers' in prompt  # indented from 0
            whole |= "return list" in prompt
            signature |= 'More of it.\n    """' in prompt and "return list" not in prompt
        else:
            described |= "The numbers of all rows from the first one on." in prompt and "More of it" not in prompt
    assert (whole, signature, described) == (True, True, True)


def test_only_prose_becomes_a_prompt(script: ModuleType) -> None:
    (prompt,) = script.text_prompts([f"Short.\n\n{PROSE}\n\n" + "x = [1, 2, 3]; y = x[::-1]\n" * 8])
    assert PROSE.strip() in prompt
    assert prompt == next(script.text_prompts([PROSE]))


def test_a_file_that_is_no_python_is_left_out(script: ModuleType, tmp_path: Path) -> None:
    (path := tmp_path / "broken.py").write_text("def (:")
    assert list(script.read_modules([path])) == []
