"""Standard error as a rich console for progress bars and live views."""

from __future__ import annotations

from rich.console import Console


class StandardError(Console):
    """A console on standard error that survives a closed pipe (``2>&1 | tee`` at Ctrl-C), at which rich would exit."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """Stop printing, and let the process continue."""
        self.quiet = True
