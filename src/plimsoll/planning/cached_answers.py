"""A cache of predictions and plans of jobs. An entry is valid while the facts that it depends on are unchanged.

    plan, is_kept = plan_of(job, limit_bytes=1 << 30)

Predictions and plans depend on the facts of `plimsoll.planning.cached_traces`, on measured speeds and on the
calibration. Reading a cached prediction or plan imports torch only if this machine may have a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from plimsoll.data.quick_facts import TextSketch, sketch_texts
from plimsoll.errors import PlimsollError
from plimsoll.planning.baseline import LoadTraining, baseline_for, load_model_code
from plimsoll.planning.cached_traces import facts_of, kept_or_made
from plimsoll.planning.lean_imports import uncollected
from plimsoll.records.base import cache_folder
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan
from plimsoll.records.prediction import Prediction

if TYPE_CHECKING:
    from plimsoll.records.comparison import Calibration

Progress = Callable[[str], None]

KEPT_SENTENCE = "Kept from an earlier command: nothing that it depends on has changed (see `plimsoll cache`)."

_MEASURED = ("speed-*.json", "exchange-*.json")


def prediction_of(
    job: Job,
    *,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    load_training: LoadTraining | None = None,
    **asked: Any,
) -> tuple[Prediction, bool]:
    """Return the prediction of `plimsoll.planning.predict_job.predict_job`, and whether it was cached.

    See `plimsoll.planning.baseline.baseline_for` for ``load_training``.
    """
    texts = _sketched(job)

    def make() -> Prediction:
        with baseline_for(job, asked.get("device"), load_training) as started:
            with uncollected():
                from plimsoll.planning.predict_job import predict_job

                load_model_code(job)
                gc.freeze()  # modules are permanent: exclude them from garbage collection
            return predict_job(job, calibration=calibration, progress=progress, texts=texts, started=started, **asked)

    return kept_or_made("predictions", Prediction, _facts_of_answer(job, texts, calibration, asked), make, _measured)


def plan_of(
    job: Job,
    *,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    texts: TextSketch | None = None,
    load_training: LoadTraining | None = None,
    **asked: Any,
) -> tuple[Plan, bool]:
    """Return the plan of `plimsoll.planning.plan.plan_job`, and whether it was cached.

    See `plimsoll.planning.baseline.baseline_for` for ``load_training``.
    """
    texts = texts or _sketched(job)

    def make() -> Plan:
        with baseline_for(job, asked.get("device"), load_training) as started:
            with uncollected():
                from plimsoll.planning.plan import plan_job

                load_model_code(job)
                gc.freeze()  # modules are permanent: exclude them from garbage collection
            return plan_job(job, calibration=calibration, progress=progress, texts=texts, started=started, **asked)

    return kept_or_made("plans", Plan, _facts_of_answer(job, texts, calibration, asked), make, _measured)


def _sketched(job: Job) -> TextSketch | None:
    """Return the facts of the job's texts, or ``None`` if reading them fails.

    In that case, making the prediction or plan raises the error.
    """
    with suppress(PlimsollError):
        return sketch_texts(job)
    return None


def _facts_of_answer(
    job: Job, texts: TextSketch | None, calibration: Calibration | None, asked: Mapping[str, Any]
) -> dict[str, Any] | None:
    named = job.model if isinstance(job.model, str) else None  # part of the answer
    return facts_of(job, texts, {"device": None, **asked, "calibration": calibration, "model": named})


def _measured() -> dict[str, Any]:
    """Return the measured speeds of this machine that are stored in the cache folder, as a fact of a cache entry."""
    found = []
    for path in (path for name in _MEASURED for path in cache_folder().glob(name)):
        with suppress(OSError):  # the speed is measured again if needed
            found.append([path.name, path.read_text("utf-8", "replace")])
    return {"measured": sorted(found)}
