"""Interpreters of other tools: ``make rivals`` creates an environment for each file of ``rivals/``."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def python_of(name: str) -> Path | None:
    """Return the interpreter of the environment of ``rivals/NAME.txt``, or None if it is not installed."""
    if not (HERE / "rivals" / f"{name}.txt").is_file():
        raise ValueError(f"no rivals/{name}.txt")
    python = HERE.parent / ".rivals" / name / "bin" / "python"
    return python if (python.parents[1] / ".installed").is_file() else None
