"""Programs started as several ranks, as by torchrun, and their output."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.processes import environment

WATCHDOG_SECONDS = 60
"""The time that a rank waits for another: an exchange that a rank does not reach is detected."""


def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def start_ranks(world_size: int, command: Sequence[object], **variables: str) -> list[subprocess.Popen[str]]:
    """Start a Python program once for each rank."""
    own = environment(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        WORLD_SIZE=str(world_size),
        PLIMSOLL_RANKS_TIMEOUT=str(WATCHDOG_SECONDS),
        **variables,
    )
    own["PYTHONPATH"] += f":{Path(__file__).parents[1]}"
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=own | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


def run_cases(
    folder: Path, world_size: int, cases: list[dict[str, Any]], seconds: float, program: str = "ranks_program"
) -> list[list[Any]]:
    """Run cases of a program in this folder with ``world_size`` ranks; return each rank's results of all cases."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    ranks = start_ranks(world_size, [Path(__file__).with_name(f"{program}.py"), folder])
    try:
        ends = [(rank.communicate(timeout=seconds)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [code for _, code in ends] == [0] * world_size, "\n".join(text for text, _ in ends)
    return [
        [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(world_size)
    ]
