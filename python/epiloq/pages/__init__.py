"""Self-contained HTML pages."""

from __future__ import annotations

from importlib.resources import files
from typing import Any


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
    return environment.get_template(template).render(**values)
