"""Predictions and plans of jobs that were made before, as long as nothing has changed that they depend on.

    plan, is_kept = plan_of(job, limit_bytes=1 << 30)

An answer depends on what was asked, on the job, on the surroundings (`plimsoll.device.surroundings`), on measured
speeds, on what runs have taught, and on what of the texts decides the size of the model and of its batches. Files and
folders that a job names count by what they are and not by where they are. Whether there is an answer is found out
without torch, but where a GPU may be here. NOT kept: answers for jobs with code of one's own, which may import
anything, or with a model, a tokenizer or vectors from an address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from plimsoll import cached
from plimsoll.addresses import is_remote
from plimsoll.data.sketch import TextSketch, sketch_texts
from plimsoll.device.surroundings import may_have_gpu, surroundings
from plimsoll.errors import PlimsollError, RecordError
from plimsoll.identity import changes_of, identity_of
from plimsoll.records.base import Record, cache_folder
from plimsoll.records.job import HUB_PREFIX, Job
from plimsoll.records.plan import Plan
from plimsoll.records.prediction import Prediction

if TYPE_CHECKING:
    from plimsoll.records.comparison import Calibration

Progress = Callable[[str], None]
Kept = TypeVar("Kept", bound=Record)

KEPT_SENTENCE = "Kept from an earlier command: nothing that it depends on has changed (see `plimsoll cache`)."

_OWN_CODE = re.compile(r"[\w.]+:[\w.]+")
_MEASURED = ("speed-*.json", "exchange-*.json")


def prediction_of(
    job: Job, *, calibration: Calibration | None = None, progress: Progress | None = None, **asked: Any
) -> tuple[Prediction, bool]:
    """Return `plimsoll.run.forecast.predict_job` of the same arguments, and whether that was known before."""

    def make(texts: TextSketch | None) -> Prediction:
        from plimsoll.run.forecast import predict_job

        return predict_job(job, calibration=calibration, progress=progress, texts=texts, **asked)

    return _remembered("predictions", Prediction, make, job, calibration, _sketched(job), asked)


def plan_of(
    job: Job, *, calibration: Calibration | None = None, progress: Progress | None = None,
    texts: TextSketch | None = None, **asked: Any,
) -> tuple[Plan, bool]:  # fmt: skip
    """Return `plimsoll.run.plan.plan_job` of the same arguments, and whether that was known before."""

    def make(texts: TextSketch | None) -> Plan:
        from plimsoll.run.plan import plan_job

        return plan_job(job, calibration=calibration, progress=progress, texts=texts, **asked)

    return _remembered("plans", Plan, make, job, calibration, texts or _sketched(job), asked)


def _sketched(job: Job) -> TextSketch | None:
    """What is known of the texts; ``None`` if something is wrong, which is said when the answer is made."""
    with suppress(PlimsollError):
        return sketch_texts(job)
    return None


def _remembered(  # noqa: PLR0917 -- called here only
    kind: cached.Kind, record: type[Kept], make: Callable[[TextSketch | None], Kept], job: Job,
    calibration: Calibration | None, texts: TextSketch | None, asked: Mapping[str, Any],
) -> tuple[Kept, bool]:  # fmt: skip
    facts = None if texts is None else _facts(job, calibration, texts, asked)
    content = None if facts is None else cached.read(kind, facts | {"measured": _measured()})
    if content is not None:
        with suppress(RecordError):  # where it is not such a record, it is made anew
            return record.from_json(content.decode(errors="replace"), f"an entry of {kind} in the cache"), True
    made = make(texts)
    if facts is not None:  # the machine may have been measured only now
        cached.write(kind, facts | {"measured": _measured()}, made.to_json().encode())
    return made, False


def _facts(
    job: Job, calibration: Calibration | None, texts: TextSketch, asked: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Everything that an answer depends on but the machine's speed; ``None`` if that cannot be told."""
    fields = job.model_dump(mode="json")
    fields["data"] |= {"train": None, "validation": job.data.validation and _share_or_file(job.data.validation)}
    try:
        return {
            "job": _without_paths(fields),
            "texts": _plain(texts),
            "asked": {name: _plain(value) for name, value in asked.items()},
            "calibration": _plain(calibration),
            "gpu": _gpu_here(job, asked.get("device")),
        } | surroundings()
    except (_Unknown, PlimsollError, OSError):
        return None


def _measured() -> list[list[str]]:
    """What was measured of this machine's speed."""
    files = [path for name in _MEASURED for path in cache_folder().glob(name)]
    return sorted([path.name, path.read_text("utf-8", "replace")] for path in files)


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


def _without_paths(value: Any) -> Any:
    """The fields of a job, where what a path leads to stands for the path."""
    if isinstance(value, dict):
        return {name: _without_paths(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return list(map(_without_paths, value))
    if not isinstance(value, str):
        return value
    if is_remote(value) or value.startswith(HUB_PREFIX) or _OWN_CODE.fullmatch(value):
        raise _Unknown
    found = next(filter(os.path.exists, _named(value)), None)
    return value if found is None else [str(Path(value).relative_to(found)), _state_of(found)]


def _named(text: str) -> Iterator[str]:
    """A text as a path, and the file that it is in as a path into an archive."""
    yield text
    yield from (str(one) for one in Path(text).parents if os.path.isfile(one))


def _state_of(path: str) -> list[list[Any]]:
    """Each file of a path: its name below it, size, times and a sample of its content."""
    names = [path] if os.path.isfile(path) else sorted(
        os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names
    )  # fmt: skip
    stats = [(name, os.stat(name)) for name in names]
    files = [_File(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return [
        [os.path.relpath(name, path), *numbers, sample.hex(), changed]
        for (name, *numbers, sample), changed in zip(identity_of(files), changes_of(files), strict=True)
    ]


def _gpu_here(job: Job, device: str | None) -> dict[str, Any] | None:
    """The GPU here that the answer is for, and its driver; ``None`` if it is for the processor or a GPU by its name."""
    name = (device or job.device).lower()
    if not (name in {"auto", "local"} or name.partition(":")[0] == "cuda") or not may_have_gpu():
        return None
    from plimsoll.assemble import choose_device
    from plimsoll.device.base import backend_for
    from plimsoll.device.gpus import spec_of
    from plimsoll.device.probe import versions

    here = choose_device(job.model_copy(update={"device": "auto"})) if name in {"auto", "local"} else name
    if here == "cpu":
        return None
    return versions() | {"spec": spec_of(backend_for(here).probe()).model_dump(mode="json")}
