"""A cache of predictions, plans and traces of jobs, and the facts that they depend on.

    trace, is_kept = trace_of(job, texts, lowering, choices)

An entry depends on the request, on the job, and on the surroundings (`plimsoll.device.surroundings`). It also depends
on the facts of the texts that set the size of the model and its batches. Files and folders of a job count by content,
not by path. A trace does not depend on the budget, so all plans and predictions of a training share it.

Nothing is cached in programs that call Plimsoll. Jobs with user code, which may import anything, are not cached, nor
jobs with a model, tokenizer or vectors from a URL.
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
"""Defaults for the fields of a job that no trace depends on."""


def trace_of(
    job: Job,
    texts: TextSketch,
    lowering: Lowering,
    choices: Choices,
    lengths: tuple[int, ...] = (),
    *,
    is_short: bool = False,
) -> tuple[Trace, bool]:
    """Return the trace of `plimsoll.planning.dry_run.step.dry_run_job`, and whether it was cached."""
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
    """Return the cached prediction, plan or trace for the given facts, or make and cache it.

    Args:
        kind: the part of the cache that holds the record, such as ``"plans"``.
        record: class of the record, such as `Plan`.
        facts: the facts that the record depends on. With ``None``, the cache is neither read nor written.
        make: makes the record.
        late: returns further facts, which may change while the record is made, such as a measured speed. The new entry
            is stored with the facts that ``late`` returns afterwards.

    Returns:
        the record, and whether it was cached.
    """
    content = None if facts is None else cached_answers.read(kind, {**facts, **late()})
    if content is not None:
        with suppress(RecordError):  # an entry that is not such a record is replaced
            return record.from_json(content.decode(errors="replace"), f"an entry of {kind} in the cache"), True
    made = make()
    if facts is not None:
        cached_answers.write(kind, {**facts, **late()}, made.to_json().encode())
    return made, False


def facts_of(job: Job, texts: TextSketch | None, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return all facts that a prediction, plan or trace depends on, except the machine's speed.

    ``asked`` has the other arguments of the request, by name. Returns ``None`` if the facts are unknown, for example in
    a program that calls Plimsoll, which may have changed the code of models.
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
    """The facts that a prediction, plan or trace depends on cannot be determined."""


class _File(NamedTuple):
    path: str
    num_bytes: int
    mtime_ns: int


def _share_or_file(validation: str | float) -> str | float:
    return "a file" if isinstance(validation, str) else validation


def _plain(value: Any) -> Any:
    """Return an equivalent of a value that JSON can represent, such as a list for a set."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, frozenset):
        return sorted(value)
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _by_content(value: Any, name: str = "") -> Any:
    """Return a value of a job in which the state of each file (size, times, a sample of content) replaces its path."""
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
    """Yield a text as a path and, if the path leads into an archive, also the path of the archive."""
    yield text
    yield from (str(one) for one in Path(text).parents if os.path.isfile(one))


def _state_of(path: str) -> list[list[Any]]:
    """Return, for each file under a path, its relative name, size and times, and a sample of its content."""
    names = [path] if os.path.isfile(path) else sorted(_files_below(path))
    stats = [(name, os.stat(name)) for name in names]
    files = [_File(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return [
        [os.path.relpath(name, path), *numbers, sample.hex(), changed]
        for (name, *numbers, sample), changed in zip(identity_of(files), changes_of(files), strict=True)
    ]


def _files_below(path: str) -> Iterator[str]:
    """Yield the files of a folder. Links are followed, and each folder is visited once."""
    seen = set()
    for folder, inner, names in os.walk(path, followlinks=True):
        stat = os.stat(folder)
        if (stat.st_dev, stat.st_ino) in seen:
            inner.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        yield from (os.path.join(folder, name) for name in names)


def _gpu_here(job: Job, device: str | None) -> dict[str, Any] | None:
    """Return the specification and versions of this machine's GPU.

    Returns ``None`` if the device is the CPU or a GPU given by name.
    """
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
