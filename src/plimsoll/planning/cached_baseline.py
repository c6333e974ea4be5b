"""What a training process takes before it has a model, from an earlier command where that read it of such a process.

    with cached_baseline(job, lambda: StartedBaseline(job)) as baseline:
        baseline.wait()

It depends on the surroundings and on what of the job decides what is imported; not on its data, sizes or budget.
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
    """What reads a baseline while something else is done."""

    def wait(self) -> Estimate:
        """Wait for its answer, which is the same each time.

        Raises:
            InputError: if it refused what it was given.
            DeviceError: if it could not be started.
        """
        ...


@contextmanager
def cached_baseline(job: Job, start: Callable[[], AbstractContextManager[Baseline]]) -> Iterator[Baseline]:
    """Yield what is known, or what is started for it, which is then kept."""
    # Of the data: what reads texts in training, and code of the user's, are imported.
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
