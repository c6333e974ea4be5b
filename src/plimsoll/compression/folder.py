"""The folder that a smaller model is made in: whose it is, what is kept in it on the way, and what is left at the end.

    OUT/  the files of the model, shrink.json      OUT/.shrink/  what is made on the way, removed at the end

Does NOT keep two commands that run at once apart.
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
    """Return the folder of work in ``out``, new or of the same command.

    Args:
        out: where the model is to be.
        asked: plain values that decide the results; another command has others.
        force: remove what was made there before.

    Raises:
        OutputError: if ``out`` holds something else, or cannot be written.
    """
    work = out / WORK
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file, but a model needs a folder: give another --out")
    if force and out.exists():
        if not (work / "asked.json").is_file() and not (out / SHRINK_RECORD).is_file() and any(out.iterdir()):
            raise OutputError(f"{out} is not empty, and nothing was shrunk there: give another --out")
        _remove_model(out)
    elif out.exists() and any(out.iterdir()):
        before = _read(work / "asked.json")
        if before is None and (out / SHRINK_RECORD).is_file():
            raise OutputError(f"{out} holds a model that is done: give another --out, or --force to make it anew")
        if before != asked:
            what = "holds something else" if before is None else "was begun with another model, data or options"
            raise OutputError(f"{out} {what}, and is not overwritten: give another --out, or --force to begin anew")
    try:
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(work / "asked.json", json.dumps(asked).encode())
    except OSError as error:
        raise OutputError(f"cannot make {work}: {error.strerror}; give another --out") from None
    return work


def refuse_overlap(out: Path, belongings: Sequence[Path]) -> None:
    """Refuse a place that holds, or lies in, what is read: making a model there would remove it.

    Raises:
        OutputError: it says what lies there.
    """
    place = out.resolve()
    for path in belongings:
        found = path.resolve()
        if found == place or place in found.parents:
            raise OutputError(
                f"{path} is read while a smaller model is made, and lies in --out {out}: give another --out"
            )


def found_until_now(out: Path) -> ShrinkRecord | None:
    """Return what was measured for a model that is being made in ``out``, if anything was."""
    found = out / WORK / SHRINK_RECORD
    return ShrinkRecord.load(found) if found.is_file() else None


def drop_if_empty(work: Path) -> None:
    """Remove the folder of work where no model was made in it, and the folder it is in where there is nothing else."""
    if any((work / "models").glob("*/*.json")):
        return
    shutil.rmtree(work, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not empty
        work.parent.rmdir()


def _remove_model(out: Path) -> None:
    """Remove what `take` and the work have put there, and nothing else."""
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
    """Put the files of the model that was chosen where they were asked for; they stay where they are, too."""
    for path in sorted(folder.rglob("*")):
        target = out / path.relative_to(folder)
        if path.is_dir():
            target.mkdir(exist_ok=True)
            continue
        temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
        temporary.unlink(missing_ok=True)
        try:
            temporary.hardlink_to(path)
        except OSError:  # a file system without links
            shutil.copyfile(path, temporary)
        temporary.replace(target)
