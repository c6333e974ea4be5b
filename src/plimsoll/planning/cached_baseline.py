"""A cache of baselines: the memory of a training process without a model, measured by an earlier command.

    with cached_baseline(job, lambda: StartedBaseline(job)) as baseline:
        baseline.wait()

An entry depends on the versions and settings of the machine (`plimsoll.device.surroundings`), and on the fields of the
job that determine its imports. It does not depend on the job's data, sizes or budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from pydantic import ValidationError

from plimsoll.data.quick_facts import TextSketch
from plimsoll.files import cached_answers
from plimsoll.planning.cached_traces import NOT_OF_A_TRACE, facts_of
from plimsoll.records.job import DataSource, Job
from plimsoll.records.prediction import Estimate

_NOT_OF_A_BASELINE = NOT_OF_A_TRACE | {
    "batch_size": 1, "batch_tokens": None, "sequence_length": 2, "evaluate_every": None,
}  # fmt: skip


class Baseline(Protocol):
    """A running measurement of a baseline."""

    def wait(self) -> Estimate:
        """Return the baseline, after waiting for it the first time.

        Raises:
            InputError: if the process refused its input.
            DeviceError: if the process could not be started.
        """
        ...


@contextmanager
def cached_baseline(job: Job, start: Callable[[], AbstractContextManager[Baseline]]) -> Iterator[Baseline]:
    """Yield the cached baseline, or start a measurement and cache its result."""
    # Only these fields of the data determine imports: the reader of texts, and the user's code.
    imported = {"on_the_fly": job.data.on_the_fly, "augment": job.data.augment}
    data = DataSource(train="any").model_copy(update=imported)
    of = job.model_copy(update=_NOT_OF_A_BASELINE | {"data": data})
    facts = facts_of(of, TextSketch(job.tokenizer.vocab_size, None, 0), {})
    known = None if facts is None else _known(facts)
    if known is not None:
        yield _Known(known)
        return
    with start() as started:
        yield started if facts is None else _Keeping(started, facts)


def _known(facts: cached_answers.Facts) -> Estimate | None:
    content = cached_answers.read("baselines", facts)
    try:
        return None if content is None else Estimate.model_validate_json(content)
    except ValidationError:
        return None


class _Known:
    def __init__(self, answer: Estimate) -> None:
        self._answer = answer

    def wait(self) -> Estimate:
        return self._answer


class _Keeping:
    def __init__(self, started: Baseline, facts: cached_answers.Facts) -> None:
        self._started, self._facts = started, facts

    def wait(self) -> Estimate:
        answer = self._started.wait()
        cached_answers.write("baselines", self._facts, answer.model_dump_json().encode())
        return answer
