"""The output folder of ``plimsoll shrink``: checks for files of other programs, work files, and the final model.

    OUT/  the model files, shrink.json      OUT/.shrink/  work files, removed at the end

Does NOT protect against two commands that run in the same folder at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plimsoll.errors import OutputError
from plimsoll.records.base import write_atomically
from plimsoll.records.shrink import SHRINK_RECORD, ShrinkRecord

WORK = ".shrink"

_MODEL_FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "modeling_shrunk.py"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
)


def opened(out: Path, asked: Any, force: bool) -> Path:
    """Return the work folder in ``out``: a new one, or the folder of an interrupted command with equal ``asked``.

    Args:
        out: the folder for the model.
        asked: the JSON values on which the models in the work folder depend. A folder with other values is refused.
        force: remove previous results of ``plimsoll shrink`` first.

    Raises:
        OutputError: if ``out`` holds other files or results, or cannot be written.
    """
    work = out / WORK
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file, but a model needs a folder: give another --out")
    if force and out.exists():
        if not (work / "asked.json").is_file() and not (out / SHRINK_RECORD).is_file() and any(out.iterdir()):
            raise OutputError(f"{out} is not empty, and not a result of `plimsoll shrink`: give another --out")
        _remove_model(out)
    elif out.exists() and any(out.iterdir()):
        before = _read(work / "asked.json")
        if before is None and (out / SHRINK_RECORD).is_file():
            raise OutputError(f"{out} holds a finished model: give another --out, or --force to make it again")
        if before != asked:
            what = "holds other files" if before is None else "was started with another model, data or options"
            raise OutputError(f"{out} {what}, and is not overwritten: give another --out, or --force to start again")
    try:
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(work / "asked.json", json.dumps(asked).encode())
    except OSError as error:
        raise OutputError(f"cannot make {work}: {error.strerror}; give another --out") from None
    return work


def refuse_overlap(out: Path, belongings: Sequence[Path]) -> None:
    """Refuse an output folder that contains an input, since writing the model would remove it.

    Raises:
        OutputError: if ``out`` is, or contains, one of the inputs (``belongings``); the message names the input.
    """
    place = out.resolve()
    for path in belongings:
        found = path.resolve()
        if found == place or place in found.parents:
            raise OutputError(f"{path} is an input and lies in --out {out}: give another --out")


def found_until_now(out: Path) -> ShrinkRecord | None:
    """Return the record of an unfinished search in ``out``; ``None`` if there is no such record."""
    found = out / WORK / SHRINK_RECORD
    return ShrinkRecord.load(found) if found.is_file() else None


def drop_if_empty(work: Path) -> None:
    """Remove the work folder if it has no models, and then the output folder around it if that is empty."""
    if any((work / "models").glob("*/*.json")):
        return
    shutil.rmtree(work, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not empty
        work.parent.rmdir()


def _remove_model(out: Path) -> None:
    """Remove the work folder and the previous model: only files that the search and `take` have written to ``out``."""
    shutil.rmtree(out / WORK, ignore_errors=True)
    record = out / SHRINK_RECORD
    for pattern in _MODEL_FILES if record.is_file() else ():
        for path in out.glob(pattern):
            path.unlink()
    for settings in out.glob("[0-9]_*/config.json") if record.is_file() else ():  # of sentence-transformers
        shutil.rmtree(settings.parent)
    record.unlink(missing_ok=True)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def take(folder: Path, out: Path) -> None:
    """Link or copy all files of ``folder`` into ``out``, replacing files of the same name. ``folder`` is unchanged."""
    for path in sorted(folder.rglob("*")):
        target = out / path.relative_to(folder)
        if path.is_dir():
            target.mkdir(exist_ok=True)
            continue
        temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
        temporary.unlink(missing_ok=True)
        try:
            temporary.hardlink_to(path)
        except OSError:  # the file system has no hard links
            shutil.copyfile(path, temporary)
        temporary.replace(target)
