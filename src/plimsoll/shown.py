"""How a record is shown in a notebook: the hook of IPython's ``_repr_html_``, filled when the package is imported.

Records know nothing of reports. `plimsoll` itself knows both and sets ``to_html``, a function that loads the reports
when a notebook asks for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """Something a notebook shows as HTML, where ``to_html`` knows it; else as its text."""

    to_html: ClassVar[Callable[[Any], str | None] | None] = None

    def _repr_html_(self) -> str | None:
        return None if Shown.to_html is None else Shown.to_html(self)
