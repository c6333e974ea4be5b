"""Options that several commands have, each written once."""

from __future__ import annotations

from typing import Annotated

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
"""Every command that shows progress has it; ``--json`` shows none either."""
