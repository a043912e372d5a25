"""Settings of the documentation site, which `make docs` builds with Sphinx into build/docs."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import pipeline

project = "Penstock"
html_title = f"Penstock {pipeline.__version__}"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["schedules"]
myst_heading_anchors = 4  # links to headings are those of GitHub
default_role = "code"  # one backtick, as in the pages
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
_NOT_OURS = "Module,ABC,Enum,str,int,tuple,ValueError,RuntimeError,Exception,BaseException,object"
autodoc_default_options = {"members": True, "imported-members": True, "inherited-members": _NOT_OURS}


def from_root(app: Sphinx, page: str, text: list[str]) -> None:
    """Put a file of the root in the place of its name, with links as they are from here; a folder has no page."""

    def read(match: re.Match[str]) -> str:
        found = Path(app.srcdir, "..", match["file"]).read_text()
        found = re.sub(r"\[([^\]]*)\]\([^)]*/\)", r"\1", found)
        found = found.replace("](CHANGELOG.md)", "](docs/changelog.md)")
        found = re.sub(r"\]\((?!https?:|#|docs/)", "](../", found)
        return found.replace("](docs/", "](")

    text[0] = re.sub(r"^<!-- (?P<file>[A-Z]+\.md) -->$", read, text[0], flags=re.MULTILINE)


def drawn(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Show what is indented in a module's docstring as it stands: it is a picture, or code."""
    if what == "module":
        text = "\n".join(lines)
        lines[:] = re.sub(r"\n\n(?=    )", "\n\n::\n\n", text, count=1).split("\n")


def setup(app: Sphinx) -> None:
    app.connect("source-read", from_root)
    app.connect("autodoc-process-docstring", drawn)
