"""Links between the pages lead to a file, and to a heading of it. The site itself is made by scripts/docs.sh."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^()\s#]*)(?:#([^()\s]*))?\)")


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them: in small letters, with hyphens for spaces, without other signs."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}


def dead_links(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for path, anchor in LINK.findall(prose(page)):
        target = page.parent / path if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            found.append(f"{path}#{anchor}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page)


def test_a_dead_link_is_found(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title, with signs\n[a](page.md#a-title-with-signs) [b](other.md) [c](#none) `[d](code.md)`\n")
    assert dead_links(page) == ["other.md#", "#none"]
