"""The configuration of Sphinx. make_site.py copies it beside the staged pages."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))  # mathml

project = "lrpe_fairseq"
author = "the authors of lrpe_fairseq"
html_title = project
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml"]
exclude_patterns = ["raw"]

html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_extra_path = ["raw"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 6  # the anchors that GitHub gives to headings
myst_fence_as_directive = ["math"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

SCRIPTS = ("datatables.js", "plotly.min.js", "results.js", "explorer.js")
STYLES = ("datatables.css", "explorer.css")
NAMED = re.compile(r"((?:\w+, )*\w+): (?=\S)")
SECTION = re.compile(r"\w[\w ]*:")
LITERAL = re.compile(r"(``.+?``|:\w+:`[^`]+`|`[^`]+`)")
MARKUP = re.compile(r"([|*])|(?<=[^\W_])_(?!\w)")


def for_sphinx(lines: list[str]) -> list[str]:
    """Return the lines of a docstring in reStructuredText.

    Our docstrings describe fields, and what is raised, as "name: text" in running lines, whose
    continuations are indented: these become paragraphs. Sections such as "Args:" are left to
    napoleon. Mathematics such as ``|s - t|`` or ``R_(s-t)`` is no markup.
    """
    result, in_section, in_field = [], False, False
    for line in lines:
        stripped = line.lstrip()
        own = bool(stripped) and line == stripped  # not indented
        if own:
            in_section = SECTION.fullmatch(line) is not None
        named = NAMED.match(line) if own else None
        in_field = named is not None or (in_field and bool(stripped) and not in_section)
        if stripped.startswith((">>>", "...")):
            result.append(line)
        elif named:
            result += ["", f"**{named[1]}:** {escaped(line[named.end() :])}"]
        else:
            result.append(escaped(stripped if in_field else line))
    return result


def escaped(line: str) -> str:
    """Return a line whose bars, stars and final underscores are characters, except in literals.

    >>> escaped("``a|b`` of |s - t|, R_(s)")
    '``a|b`` of \\\\|s - t\\\\|, R\\\\_(s)'
    """
    parts = LITERAL.split(line)
    return "".join(
        part if place % 2 else MARKUP.sub(lambda found: "\\" + found[0], part)
        for place, part in enumerate(parts)
    )


def _docstring(
    app: "Sphinx", what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    # napoleon takes "text: text" in the first line of an attribute for its type
    first = [""] if what in ("attribute", "data", "property") else []
    lines[:] = [*first, *for_sphinx(lines)]


def _explorer(app: "Sphinx", page: str, template: str, context: Any, tree: Any) -> None:
    """Add the scripts of the explorer to its page only."""
    if page == "explore":
        for name in STYLES:
            app.add_css_file(name)
        for name in SCRIPTS:
            app.add_js_file(name, loading_method="defer")


def setup(app: "Sphinx") -> None:
    """Connect what is configured above."""
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
    app.connect("html-page-context", _explorer)
