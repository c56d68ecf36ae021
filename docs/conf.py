"""Sphinx: the guides and the API reference, built by `make docs` into build/docs."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.roles import XRefRole
from sphinx.util.nodes import make_refnode

import epiloq

# Loaded before autodoc, which would otherwise import each a second time and then hold two classes of a name.
for _module in pkgutil.walk_packages(epiloq.__path__, "epiloq."):
    if not _module.name.rpartition(".")[2].startswith("_"):
        with contextlib.suppress(ImportError):  # of an extra that is not there
            importlib.import_module(_module.name)

project = "epiloq"
author = "the epiloq authors"
html_show_copyright = False  # the licence is in the repository
version = release = epiloq.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"epiloq {release}"
html_static_path = ["static"]
html_css_files = ["tables.css"]
myst_heading_anchors = 3
suppress_warnings = [
    "myst.xref_missing"
]  # links to files that are no pages; tests/build/test_documentation.py checks them

nitpicky = True
nitpick_ignore_regex = [
    # Types of signatures: torch's and the standard library's, whose inventories a build without a network lacks.
    ("py:.*", r"(torch|transformers|numpy|np|os|collections|pathlib|typing|types|inspect|contextlib)\..*"),
    ("py:.*", r"(Tensor|nn|torch|Path|Callable|Iterable|Iterator|Mapping|Sequence|Any|optional)(\..*)?"),
    ("py:class", r"Pair|Padding|Clamp|epiloq\.formats\.table\.Written|epiloq\..*\.(_\w+|T)"),  # aliases, type variables
    ("py:class", r"epiloq\.tuning\.(store\.Card|tuner\.Measured)"),
]
default_role = "name"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_use_rtype = False

_SECTIONS = "Args|Returns|Raises|Yields|Attributes|Examples?|Notes?|Source|Sources"


class NameRole(XRefRole):
    """`name` in a docstring: a Python object, or an argument or the like."""

    def process_link(self, *arguments: Any) -> tuple[str, str]:
        _, node, _, title, target = arguments
        node["refdomain"], node["reftype"], node["is_name"] = "py", "obj", True
        return title, target


def resolve_name(app: Sphinx, env: BuildEnvironment, node: Any, content: nodes.Element) -> nodes.Node | None:
    """A name that is no neighbour: the only object of that name anywhere, or none. But a class must be found."""
    if not node.get("is_name"):
        return None
    target, domain = node["reftarget"], env.domains.python_domain
    found = {(entry.docname, entry.node_id) for name, entry in domain.objects.items() if name.endswith(f".{target}")}
    if len(found) == 1:
        ((page, anchor),) = found
        return make_refnode(app.builder, node["refdoc"], page, anchor, content, target)
    must_be_found = re.fullmatch(r"epiloq\..*|(?:\w+\.)*[A-Z]\w*[a-z]\w*", target)
    return None if must_be_found else content


def keep_lines_and_colons(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """What napoleon would misread. A line that ends with a colon, and is no section, starts a table of aligned columns:
    its lines are kept. In a property's first sentence a colon does not end a type.
    """
    if what in ("property", "attribute") and lines:
        lines[0] = lines[0].replace(": ", " \N{EN DASH} ")
    for index in range(len(lines) - 2, -1, -1):
        line, following = lines[index], lines[index + 1]
        indent = len(line) - len(line.lstrip())
        if not line.endswith(":") or line.endswith("::") or re.fullmatch(rf" *(?:{_SECTIONS}):", line):
            continue
        if not following.strip() or len(following) - len(following.lstrip()) <= indent:
            continue
        end = index + 1
        while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent):
            end += 1
        lines[index : index + 1] = [line + ":", ""]
        lines.insert(end + 1, "")


def setup(app: Sphinx) -> None:
    app.add_role("name", NameRole(innernodeclass=nodes.literal))
    app.connect("missing-reference", resolve_name)
    app.connect("autodoc-process-docstring", keep_lines_and_colons, priority=400)
