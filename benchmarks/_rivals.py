"""Where the interpreters of other tools are: ``make rivals`` makes an environment for each file of ``rivals/``."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def python_of(name: str) -> Path | None:
    """The interpreter of the environment that ``rivals/NAME.txt`` describes, ``None`` where it is not installed."""
    if not (HERE / "rivals" / f"{name}.txt").is_file():
        raise ValueError(f"no rivals/{name}.txt")
    python = HERE.parent / ".rivals" / name / "bin" / "python"
    return python if (python.parents[1] / ".installed").is_file() else None
