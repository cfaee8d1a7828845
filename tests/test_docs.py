"""Pages that README and docs point to are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


def test_every_page_is_reached_from_readme() -> None:
    reached: set[Path] = set()
    pending = [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        reached.add(page)
        links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
        targets = [(page.parent / link).resolve() for link in links]
        pending += [target for target in targets if target.suffix == ".md" and target not in reached]
    # docs/status.md is for those who change the code.
    assert {page for page in PAGES if page.name != "status.md"} <= reached
