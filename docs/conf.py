"""Configuration of Sphinx for the site, which `scripts/check site` builds into build/site.

Its pages are the Markdown files, at the same paths, and docs/api/, which renders docstrings. Warnings are errors: a
broken link or anchor, a page without a place in the navigation, or a docstring that cannot be parsed ends the build.
"""

import re
import shutil

from sphinx.application import Sphinx

NAVIGATION = {
    "Users": [f"docs/users/{page}" for page in (
        "python", "adopting", "recorders", "command_line", "simulation", "library", "formats", "troubleshooting",
        "glossary")],
    "Developers": [f"docs/developers/{page}" for page in ("first_change", "contributing", "architecture", "algorithms", "execution")],
    "Laboratory": [f"lab/{page}" for page in (
        "README", "results", "performance", "measured/README", "engines/README", "policies", "hyperparameters", "seeds")],
    "API": [f"docs/api/{page}" for page in (
        "foremoe", "options", "recorders", "report", "eplb", "torch", "hf", "trl", "megatron", "slime", "miles", "verl", "supported")],
    "Project": ["CHANGELOG", "SECURITY", "data/README", "lab/measured/NOTICE"],
}

project = html_title = "ForeMoE"
root_doc = "README"
include_patterns = [f"{root_doc}.*", *(f"{page}.*" for pages in NAVIGATION.values() for page in pages)]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 6
suppress_warnings = ["misc.highlighting_failure"]  # code with …
default_role = "code"  # `name` in docstrings
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
html_theme = "furo"
html_theme_options = {"light_css_variables": {"code-font-size": "75%"}}
html_static_path = html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = html_show_copyright = False


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the navigation to the first page: README.md has no directives, since GitHub would print them."""
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            source[0] += "\n".join(["\n```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```\n"])


def complete_markup(app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """Changes a docstring, in place, to reStructuredText: `::` announces code, and types of properties are code."""
    marked: list[str] = []
    in_code = False
    for i, line in enumerate(lines):
        if line and not line.startswith(" "):
            in_code = False
        elif line.startswith("    ") and not in_code and (i == 0 or not lines[i - 1]):
            in_code = True
            marked += ["::", ""]
        marked.append(re.sub(r"^\(self\) -> (.+)", r"`\1`", line))  # written by nanobind
    lines[:] = marked


def add_first_page(app: Sphinx, error: Exception | None) -> None:
    """Copies the first page to index.html, which browsers and servers expect."""
    if error is None:
        shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", complete_markup, priority=400)  # before napoleon
    app.connect("build-finished", add_first_page)
