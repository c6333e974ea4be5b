"""The nouns: frozen, torch-free values, each a JSON file with a kind and a schema version; one module per stage."""

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """Something a notebook shows as HTML, where ``to_html`` knows it; else as its text."""

    to_html: ClassVar[Callable[[Any], str | None] | None] = None

    def _repr_html_(self) -> str | None:
        return None if Shown.to_html is None else Shown.to_html(self)
