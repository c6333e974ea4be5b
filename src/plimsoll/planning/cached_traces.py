"""What was computed for a job before, as long as nothing has changed that it depends on: the facts, and traces.

    trace, is_kept = trace_of(job, texts, lowering, choices)

What is computed for a job depends on what was asked, on the job, on what of the texts decides the size of the model and
of its batches, and on the surroundings (`plimsoll.device.surroundings`). Files and folders that a job names count by
what they are and not by where they are. A trace depends on no budget: all plans of a training share them, and a
prediction does. NOT kept: anything in programs that call Plimsoll, for jobs with code of one's own, which may import
anything, or with a model, a tokenizer or vectors from an address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.surroundings import may_have_gpu, surroundings
from plimsoll.errors import PlimsollError, RecordError
from plimsoll.files import cached_answers
from plimsoll.files.addresses import is_remote
from plimsoll.files.identity import changes_of, identity_of
from plimsoll.models.names import is_own_function
from plimsoll.planning.lean_imports import is_a_command
from plimsoll.records.base import Record
from plimsoll.records.device import Budget
from plimsoll.records.job import HUB_PREFIX, PATHS, CheckpointPolicy, Job
from plimsoll.records.trace import Trace

if TYPE_CHECKING:
    from plimsoll.memory.lowering.base import Lowering
    from plimsoll.techniques import Choices

Kept = TypeVar("Kept", bound=Record)

_OWN_CODE = re.compile(r"[\w.]+:[\w.]+")
_PATHS = frozenset({"model", "data.augment.synonyms"} | set(map(".".join, PATHS)))
NOT_OF_A_TRACE: dict[str, Any] = {
    "budget": Budget(), "checkpoint": CheckpointPolicy(), "pin": (), "seed": 0, "device": "auto", "steps": 1,
}  # fmt: skip
"""Fields of a job that no trace depends on, as they are by default."""


def trace_of(
    job: Job,
    texts: TextSketch,
    lowering: Lowering,
    choices: Choices,
    lengths: tuple[int, ...] = (),
    *,
    is_short: bool = False,
) -> tuple[Trace, bool]:
    """Return `plimsoll.planning.dry_run.step.dry_run_job` of the same arguments, and whether that was known before."""
    import torch

    from plimsoll.planning.dry_run.step import dry_run_job

    def make() -> Trace:
        return dry_run_job(job, texts, lowering, choices, lengths, is_short=is_short)

    asked = {
        "lowering": [lowering.name, getattr(lowering, "num_sms", None)], "choices": list(map(str, choices)),
        "lengths": lengths, "is_short": is_short, "threads": torch.get_num_threads(),
    }  # fmt: skip
    return kept_or_made("traces", Trace, facts_of(job.model_copy(update=NOT_OF_A_TRACE), texts, asked), make)


def kept_or_made(
    kind: cached_answers.Kind,
    record: type[Kept],
    facts: cached_answers.Facts | None,
    make: Callable[[], Kept],
    late: Callable[[], dict[str, Any]] = dict,
) -> tuple[Kept, bool]:
    """Return the answer kept under these facts, or make it and keep it.

    Args:
        kind: of the answer.
        record: its class.
        facts: that it depends on; ``None``: it is made, and not kept.
        make: makes it.
        late: further facts, asked again after it is made, such as a speed that was measured for it.
    """
    content = None if facts is None else cached_answers.read(kind, {**facts, **late()})
    if content is not None:
        with suppress(RecordError):  # where it is not such a record, it is made anew
            return record.from_json(content.decode(errors="replace"), f"an entry of {kind} in the cache"), True
    made = make()
    if facts is not None:
        cached_answers.write(kind, {**facts, **late()}, made.to_json().encode())
    return made, False


def facts_of(job: Job, texts: TextSketch | None, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Everything that an answer depends on but the machine's speed; ``None`` if that cannot be told.

    It cannot in a program that calls Plimsoll, which may have changed how models compute.
    """
    if texts is None or not is_a_command():
        return None
    fields = job.model_dump(mode="json")
    fields["data"] |= {"train": None, "validation": job.data.validation and _share_or_file(job.data.validation)}
    try:
        return {
            "job": _by_content(fields),
            "texts": _plain(texts),
            "asked": {name: _plain(value) for name, value in asked.items()},
            "gpu": _gpu_here(job, asked["device"]) if "device" in asked else None,
        } | surroundings()
    except (_Unknown, PlimsollError, OSError):
        return None


class _Unknown(Exception):
    """What an answer depends on cannot be told."""


class _File(NamedTuple):
    path: str
    num_bytes: int
    mtime_ns: int


def _share_or_file(validation: str | float) -> str | float:
    return "a file" if isinstance(validation, str) else validation


def _plain(value: Any) -> Any:
    """As JSON can say it."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, frozenset):
        return sorted(value)
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _by_content(value: Any, name: str = "") -> Any:
    """The fields of a job, where what a path leads to stands for the path."""
    if isinstance(value, dict):
        return {key: _by_content(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items()}
    if isinstance(value, list):
        return [_by_content(inner) for inner in value]
    if not isinstance(value, str):
        return value
    is_own = is_own_function(value) if name == "model" else bool(_OWN_CODE.fullmatch(value))
    if is_own or is_remote(value) or value.startswith(HUB_PREFIX):
        raise _Unknown
    found = next(filter(os.path.exists, _named(value)), None) if name in _PATHS else None
    return value if found is None else {"path": [str(Path(value).relative_to(found)), _state_of(found)]}


def _named(text: str) -> Iterator[str]:
    """A text as a path, and the file that it is in as a path into an archive."""
    yield text
    yield from (str(one) for one in Path(text).parents if os.path.isfile(one))


def _state_of(path: str) -> list[list[Any]]:
    """Each file of a path: its name below it, size, times and a sample of its content."""
    names = [path] if os.path.isfile(path) else sorted(_files_below(path))
    stats = [(name, os.stat(name)) for name in names]
    files = [_File(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return [
        [os.path.relpath(name, path), *numbers, sample.hex(), changed]
        for (name, *numbers, sample), changed in zip(identity_of(files), changes_of(files), strict=True)
    ]


def _files_below(path: str) -> Iterator[str]:
    """The files of a folder and of those that links in it lead to, each folder once."""
    seen = set()
    for folder, inner, names in os.walk(path, followlinks=True):
        stat = os.stat(folder)
        if (stat.st_dev, stat.st_ino) in seen:
            inner.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        yield from (os.path.join(folder, name) for name in names)


def _gpu_here(job: Job, device: str | None) -> dict[str, Any] | None:
    """The GPU here that the answer is for, and its driver; ``None`` if it is for the processor or a GPU by its name."""
    name = (device or job.device).lower()
    if not (name in {"auto", "local"} or name.partition(":")[0] == "cuda") or not may_have_gpu():
        return None
    from plimsoll.device.base import backend_for
    from plimsoll.device.cuda.gpus import spec_of
    from plimsoll.device.probe import versions
    from plimsoll.models.assemble import choose_device

    here = choose_device(job.model_copy(update={"device": "auto"})) if name in {"auto", "local"} else name
    if here == "cpu":
        return None
    return versions() | {"spec": spec_of(backend_for(here).probe()).model_dump(mode="json")}
