"""Cached traces: equal event by event, and reused for the same training only.

Whole answers test the other dependencies of a job (`test_run_asked_again`).
"""

import pytest
import torch

from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.planning.cached_traces import trace_of
from plimsoll.planning.dry_run import step
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice

pytestmark = pytest.mark.usefixtures("as_a_command")

SMALL = {"architecture": "lstm", "embedding_size": 32, "hidden_size": 32}


def job(**changes):
    fields = {"model": SMALL, "data": "nowhere.txt", "tokenizer": {"vocab_size": 1000}, "sequence_length": 32}
    return Job.from_fields(fields | changes)


def traced(of, *choices, capability=(8, 6), **options):
    """Return a trace, and whether it was cached."""
    texts = TextSketch(1000, None, 0)
    return trace_of(of, texts, CudaLowering(capability), (micro_batch_choice(4), *choices), **options)


def test_a_kept_trace_is_the_same_event_by_event(monkeypatch):
    first, is_kept = traced(job())
    assert not is_kept
    monkeypatch.setattr(step, "dry_run_job", None)
    assert traced(job()) == (first, True)


def test_a_trace_depends_on_the_training_and_not_on_its_limit_or_its_length(monkeypatch):
    trace = traced(job())[0]
    monkeypatch.setattr(step, "dry_run_job", lambda *arguments, **options: trace)
    alike = [job(budget="1GiB"), job(pin=["heap=never"]), job(seed=5), job(steps=7), job(checkpoint={"every": 3})]
    assert [traced(one)[1] for one in alike] == [True] * len(alike)
    options = Choice(technique="checkpointing", options={"blocks": "all"})
    others = [
        lambda: traced(job(batch_size=33)), lambda: traced(job(optimizer="sgd")), lambda: traced(job(), options),
        lambda: traced(job(), is_short=True), lambda: traced(job(), lengths=(3,)),
        lambda: traced(job(), capability=(9, 0)),
        lambda: trace_of(job(), TextSketch(1001, None, 0), CudaLowering((8, 6)), (micro_batch_choice(4),)),
        lambda: trace_of(job(), TextSketch(1000, None, 0), CudaLowering((8, 6), 3), (micro_batch_choice(4),)),
    ]  # fmt: skip
    assert [other()[1] for other in others] == [False] * len(others)
    assert [other()[1] for other in others] == [True] * len(others)


def test_scratch_of_more_threads_is_in_another_trace():
    before = torch.get_num_threads()
    assert [traced(job())[1] for _ in range(2)] == [False, True]
    torch.set_num_threads(before + 1)
    try:
        assert not traced(job())[1]
    finally:
        torch.set_num_threads(before)
