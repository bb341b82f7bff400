"""Sphinx configuration of the site of all pages: bash scripts/docs.sh."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

import megasnn

project = "MegaSNN"
html_title = project
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures have no page
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "findings/README.md"]
exclude_patterns = [".*", "build", "runs", "megasnn", "tests", "tools"]
html_copy_source = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
smartquotes = False  # flags keep their two dashes
myst_heading_anchors = 4  # `page.md#a-heading`, the same anchors as on code hosts
nitpicky = True
highlight_language = "none"  # default for code blocks without a language

CONTENTS = {
    "Start": ["quickstart", "models", "tasks", "language", "data", "recipes", "python", "beside"],
    "Many ranks": ["parallelism", "schedules", "memory", "planner", "clusters"],
    "Runs": ["watching", "checkpoints", "nir", "flags", "gpu", "api"],
}
LISTED = {name for names in CONTENTS.values() for name in names}
OTHERS = sorted(file.stem for file in Path(__file__).parent.glob("*.md") if file.stem not in LISTED)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the table of contents to the README in the site only."""
    if page == root_doc:
        parts = CONTENTS | {"Project": OTHERS}
        for title, names in parts.items():
            pages = [f"docs/{name}" for name in names]
            if title == "Project":
                pages += ["CHANGELOG", "CONTRIBUTING", "findings/README"]
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", *pages, "```", ""])


def add_reference(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the docstring of every public name to the page of names in the site only."""
    if page != "docs/api":
        return
    for name in sorted(megasnn.__all__, key=str.lower):
        value = getattr(megasnn, name)
        kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
        source[0] += f"\n## {name}\n\n```{{eval-rst}}\n.. auto{kind}:: megasnn.{name}\n```\n"


def add_start(app: Sphinx, error: Exception | None) -> None:
    """Writes index.html, which leads to the README."""
    if error is None:
        link = f'<meta http-equiv="refresh" content="0; url={root_doc}.html"><a href="{root_doc}.html">{project}</a>\n'
        (app.outdir / "index.html").write_text(link)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("source-read", add_reference)
    app.connect("build-finished", add_start)
