"""Python programs in separate processes, for tests that end the process or run out of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import plimsoll

LONGEST_SECONDS = 120


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, changed so that a subprocess imports the plimsoll under test."""
    sources = str(Path(plimsoll.__file__).parents[1])
    return os.environ | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1"} | variables


def run_program(program: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
