"""jinja2 templates of pages and notebooks. Text from records is escaped, and undefined names raise an error."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def environment() -> Environment:
    """Return the jinja2 environment of the templates in this package."""
    return Environment(
        loader=PackageLoader("plimsoll.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
