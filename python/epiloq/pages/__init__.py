"""Self-contained HTML pages."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from epiloq.environment import counted

if TYPE_CHECKING:
    from markupsafe import Markup


def breakable(name: str) -> Markup:
    """A dotted name that a narrow page wraps after a dot rather than inside a word."""
    from markupsafe import Markup, escape

    return Markup(".<wbr>").join(escape(part) for part in name.split("."))


def render(template: str, **values: Any) -> str:
    """The HTML text of a template, named as "package/file"; templates extend "epiloq.pages/page.html".

    Values are escaped, unless the template calls them safe; a value that is missing is an error.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def source(name: str) -> str:
        package, _, file = name.partition("/")
        return files(package).joinpath(file).read_text(encoding="utf-8")

    environment = Environment(
        loader=FunctionLoader(source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"breakable": breakable, "counted": counted}
    return environment.get_template(template).render(**values)
