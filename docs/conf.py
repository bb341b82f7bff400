"""How Sphinx makes one site of the README and the pages of this folder: bash scripts/docs.sh."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

project = "MegaSNN"
html_title = project
html_theme = "furo"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md"]
exclude_patterns = [".*", "build", "runs", "megasnn", "tests", "tools"]
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 4  # `page.md#a-heading`, as platforms that show the pages make them
nitpicky = True
highlight_language = "none"  # of blocks that name none

CONTENTS = {
    "Start": ["quickstart", "models", "tasks", "data", "recipes", "python"],
    "Many ranks": ["parallelism", "schedules", "memory", "planner", "clusters"],
    "Runs": ["checkpoints", "flags", "gpu"],
}
LISTED = {name for names in CONTENTS.values() for name in names}
OTHERS = sorted(file.stem for file in Path(__file__).parent.glob("*.md") if file.stem not in LISTED)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Puts the list of all pages behind the README, where a reader of the file alone does not see it."""
    if page == root_doc:
        parts = {title: [f"docs/{name}" for name in names] for title, names in (CONTENTS | {"Project": OTHERS}).items()}
        parts["Project"] += ["CHANGELOG", "CONTRIBUTING"]
        for title, pages in parts.items():
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", *pages, "```", ""])


def add_start(app: Sphinx, error: Exception | None) -> None:
    """The page that a browser opens first."""
    if error is None:
        link = f'<meta http-equiv="refresh" content="0; url={root_doc}.html"><a href="{root_doc}.html">{project}</a>\n'
        (app.outdir / "index.html").write_text(link)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_start)
