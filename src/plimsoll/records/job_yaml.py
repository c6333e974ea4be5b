"""Reading of job files as YAML into unchecked fields, and suggestions for mistyped names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from plimsoll.errors import JobError


class _Loader(yaml.SafeLoader):
    """A loader of YAML 1.1 with the floats of YAML 1.2: ``1e-4`` is a number, not a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+"), list("-+0123456789")
)


def read_fields(path: Path) -> dict[str, Any]:
    """Read the fields of a job file without checking them.

    Raises:
        JobError: if the file is missing, cannot be read, is not YAML, or has no fields.
    """
    if path.is_dir():
        raise JobError(_no_file_but_folder(path))
    if path.suffix == ".py" and path.is_file():
        raise JobError(
            f"{path} is a program, not a job: write a job file (README.md has one), or keep the program and let "
            f"`plimsoll.TrainStep` do its steps; `plimsoll lint {path}` finds mistakes in it that cost memory"
        )
    try:
        fields = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise JobError(f"there is no job file at {path}: check the path, or use the example in README.md") from None
    except OSError as error:
        raise JobError(f"the job file {path} cannot be read ({error.strerror}): change its permissions") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise JobError(f"{path} cannot be read as YAML ({error}): see the example in README.md") from None
    if not isinstance(fields, dict):
        raise JobError(f"{path} holds {fields!r}, not fields like `model: ...`: see the example in README.md")
    return fields


def parse_value(text: str) -> Any:
    """Parse one YAML value, as given with ``--set``: ``5`` becomes a number.

    Raises:
        ValueError: if the text is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not YAML: quote it") from error


def _no_file_but_folder(path: Path) -> str:
    if (path / "metrics.jsonl").is_file():
        return (
            f"{path} is a run directory, not a job file: resume it (`plimsoll train --resume --out {path}`), "
            f"or give its job file {path / 'job.yaml'} and another --out"
        )
    return f"{path} is a folder, not a job file: give the path of the job file, such as {path / 'job.yaml'}"


def near(name: str, known: Iterable[str]) -> str:
    """Return a hint about an unknown name: the nearest known name, or else all known names."""
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{matches[0]}`?" if matches else f"known here: {', '.join(known)}"
