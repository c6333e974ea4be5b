"""Standard error for what is drawn on it: progress bars and live views."""

from __future__ import annotations

from rich.console import Console


class StandardError(Console):
    """Standard error, whose reader may go away (``2>&1 | tee``, at Ctrl-C): rich would end the process there."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True
