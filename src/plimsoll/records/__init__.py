"""Records: frozen, torch-free values, each a JSON file with a kind and a schema version. One module per stage."""

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """A value that a notebook shows as HTML if ``to_html`` supports it, and as its text otherwise."""

    to_html: ClassVar[Callable[[Any], str | None] | None] = None

    def _repr_html_(self) -> str | None:
        return None if Shown.to_html is None else Shown.to_html(self)
