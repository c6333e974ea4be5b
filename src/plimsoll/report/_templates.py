"""The templates of pages and of notebooks; what a record says is escaped, and a name that is not given is an error."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def environment() -> Environment:
    """Return jinja2's environment with the templates of this folder."""
    return Environment(
        loader=PackageLoader("plimsoll.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
