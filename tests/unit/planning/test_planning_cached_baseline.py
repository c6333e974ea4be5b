"""Cached baselines: one process is measured for all jobs with the same imports."""

from contextlib import nullcontext

import pytest

from plimsoll.files import cached_answers
from plimsoll.planning.cached_baseline import cached_baseline
from plimsoll.records.job import Job
from plimsoll.records.prediction import Estimate
from prediction_records import estimate

pytestmark = pytest.mark.usefixtures("as_a_command")


class Started:
    def wait(self) -> Estimate:
        return estimate(400, 12, measured=400)


def job(**changes):
    return Job.from_fields({"model": {"architecture": "gpt2"}, "data": "nowhere.txt"} | changes)


def is_started(of):
    started = []
    with cached_baseline(of, lambda: started.append(1) or nullcontext(Started())) as baseline:
        assert [baseline.wait() for _ in range(2)] == [Started().wait()] * 2
    return bool(started)


def test_it_is_the_same_for_other_data_sizes_and_budgets():
    alike = [{}, {"data": "other.txt"}, {"batch_size": 3}, {"sequence_length": 7}, {"budget": "2GiB"}, {"steps": 3}]
    assert [is_started(job(**changes)) for changes in alike] == [True, *[False] * 5]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"architecture": "bert"}}, {"optimizer": "sgd"}, {"ranks": 2}, {"task": "classification"},
        {"data": {"train": "nowhere.txt", "on_the_fly": True, "long_texts": "truncate"}},
    ],
    ids=str,
)  # fmt: skip
def test_another_training_may_import_something_else(changes):
    assert is_started(job())
    assert is_started(job(**changes))
    assert not is_started(job(**changes))


def test_code_of_one_s_own_may_import_anything():
    noise = {"train": "nowhere.txt", "borders": "sentence", "augment": {"token_function": "mine:noise"}}
    assert is_started(job())
    for own in (job(model="mine:build"), job(data=noise)):
        assert [is_started(own) for _ in range(2)] == [True, True]


def test_what_is_no_estimate_is_read_anew(monkeypatch):
    monkeypatch.setattr(cached_answers, "read", lambda kind, facts: b"{}")
    assert is_started(job())
