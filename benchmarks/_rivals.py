"""Where the interpreters of other tools are: ``make rivals`` makes an environment for each file of ``rivals/``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent


def python_of(name: str) -> Path | None:
    """The interpreter of the environment that ``rivals/NAME.txt`` describes, ``None`` where it is not installed."""
    if not (HERE / "rivals" / f"{name}.txt").is_file():
        raise ValueError(f"no rivals/{name}.txt")
    python = HERE.parent / ".rivals" / name / "bin" / "python"
    return python if (python.parents[1] / ".installed").is_file() else None


def versions_of(name: str, packages: Iterable[str]) -> list[str]:
    """Packages of an environment with their versions, as they are said."""
    code = "import json, sys; from importlib.metadata import version; " + (
        "print(json.dumps([f'{name} {version(name)}' for name in sys.argv[1:]]))"
    )
    command = [str(python_of(name)), "-c", code, *packages]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
