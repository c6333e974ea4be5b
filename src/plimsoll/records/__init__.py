"""Records: immutable objects that are stored as JSON files with a kind and a schema version, without torch."""

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """An object that a notebook shows as HTML if ``to_html`` returns HTML for it, and otherwise as text.

    ``to_html`` is one function for all objects; the package ``plimsoll`` sets it.
    """

    to_html: ClassVar[Callable[[Any], str | None] | None] = None

    def _repr_html_(self) -> str | None:
        return None if Shown.to_html is None else Shown.to_html(self)
