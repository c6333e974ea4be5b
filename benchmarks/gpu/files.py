"""Files of recordings: their places, reading and writing. Needs no torch."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

FORMAT = 1
ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
RECORDED = ROOT / "benchmarks" / "recorded"


def recordings() -> list[Path]:
    """Return all stored recordings, of trainings and of `make gpu`."""
    return sorted(path for folder in (RECORDINGS, RECORDED) for path in folder.glob("*.json.gz") if _has_runs(path))


def _has_runs(path: Path) -> bool:
    return "runs" in json.loads(gzip.decompress(path.read_bytes()))


def read_recording(path: Path) -> dict[str, Any]:
    """Read a file written by `write_recording`.

    Raises:
        ValueError: if the file does not exist or is not a recording of this format.
    """
    try:
        recording: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a recording: {error}") from error
    found = recording.get("format") if isinstance(recording, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, and {FORMAT} is read: record it again")
    return recording


def differences(recorded: dict[str, Any], here: dict[str, Any]) -> str:
    """Describe the differences between two headers that affect all numbers; empty if there is no difference."""
    names = [name for name in ("device", "torch", "processor") if recorded.get(name) != here.get(name)]
    return ", ".join(f"{name} {recorded.get(name)} there and {here.get(name)} here" for name in names)


def write_recording(path: Path, recording: dict[str, Any]) -> None:
    """Write a recording atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = gzip.compress(json.dumps(recording, separators=(",", ":")).encode(), mtime=0)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def default_path(header: dict[str, Any]) -> Path:
    """Return the default path for a recording of this machine."""
    device = re.sub(r"[^a-z0-9]+", "-", header["device"].lower()).strip("-")
    return RECORDINGS / f"{device}-torch{header['torch'].partition('+')[0]}.json.gz"
