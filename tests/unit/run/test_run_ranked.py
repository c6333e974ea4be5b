"""What ranks settle before the first step: device, sameness, checkpoint, random numbers."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from datetime import UTC, datetime

import numpy as np
import psutil
import pytest
import torch
from tests.processes import environment

from plimsoll.device.base import backend_for
from plimsoll.device.cgroup import OomKills
from plimsoll.errors import DeviceError, InputError
from plimsoll.ranks import Ranks
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_plan
from plimsoll.records.run import DeathLine, StartLine
from plimsoll.run.directory import RunDirectory
from plimsoll.run.ranked import (
    begun_again,
    device_of_rank,
    launcher_age_seconds,
    may_begin_anew,
    oom_kills_by_machine,
    prepared_by_first,
    random_states,
    require_same,
    restore_random_state,
    seed_rank,
    starts_since,
)

BACKEND = backend_for("cpu")


class Of(Ranks):
    """One of several, with what the others say."""

    def __init__(self, rank: int, others: list[object]) -> None:
        super().__init__()
        self.rank, self.world_size, self._others = rank, len(others) + 1, others

    def gather(self, value):
        every = list(self._others)
        every.insert(self.rank, value)
        return every


def test_ranks_on_the_cpu_need_nothing_and_mixed_ones_are_refused_by_name():
    assert device_of_rank("cpu", Ranks()) == "cpu"
    assert device_of_rank("cpu", Of(0, ["", ""])) == "cpu"
    with pytest.raises(DeviceError, match="ranks 0 of 3 have no GPU, and others have"):
        device_of_rank("cpu", Of(0, ["cuda:0", "cuda:1"]))
    with pytest.raises(DeviceError, match="ranks 2 of 3 have no GPU of their own"):
        device_of_rank("cpu", Of(0, ["cuda:0", None]))


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    for name in ("job.yaml", "plan.json", "prepared.json"):
        (tmp_path / name).write_text(name)
    return RunDirectory(tmp_path)


def job(model: str = "lstm") -> Job:
    return Job.from_fields({"model": model, "data": {"train": "a.txt"}})


def facts_of(directory: RunDirectory, one: Job) -> dict[str, str]:
    seen: list[dict[str, str]] = []

    class Listening(Of):
        def gather(self, value):
            seen.append(value)
            return [value, value]

    require_same(Listening(0, [None]), directory, one)
    return seen[0]


def test_what_differs_is_named_with_the_rank(directory):
    facts = facts_of(directory, job())
    require_same(Of(0, [facts, facts]), directory, job())
    with pytest.raises(
        InputError, match=r"rank 2 differs in torch \(1\.0, rank 0 has .*\), plan\.json \(other, rank 0"
    ):
        require_same(Of(0, [facts, facts | {"plan.json": "other", "torch": "1.0"}]), directory, job())


def test_the_code_of_a_model_of_ones_own_is_compared(directory, tmp_path, monkeypatch):
    (tmp_path / "my_model_of_ranks.py").write_text("def model(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = facts_of(directory, job("my_model_of_ranks:model"))
    (tmp_path / "my_model_of_ranks.py").write_text("def model(): pass\n")
    after = facts_of(directory, job("my_model_of_ranks:model"))
    assert [name for name in before if before[name] != after[name]] == ["the code of the model"]


def test_random_numbers_are_a_ranks_own_and_come_back():
    torch.manual_seed(0)
    seed_rank(0, Ranks())  # the first draws what one process draws
    first = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3))
    seed_rank(0, Of(1, [None]))
    other = torch.rand(3), random.random(), np.random.random()
    assert not torch.equal(first, other[0])
    seed_rank(0, Of(1, [None]))
    assert torch.equal(other[0], torch.rand(3))
    assert other[1:] == (random.random(), np.random.random())


def test_each_rank_gets_its_own_state_back_and_a_new_one_begins_with_a_seed():
    torch.manual_seed(3)
    alone = random_states(BACKEND, Ranks())
    expected = torch.rand(2)
    restore_random_state(BACKEND, alone, Ranks(), seed=9)
    assert torch.equal(torch.rand(2), expected)
    both = {"by_rank": [alone, alone]}
    restore_random_state(BACKEND, both, Of(1, [None]), seed=9)
    assert torch.equal(torch.rand(2), expected)
    restore_random_state(BACKEND, both, Of(2, [None, None]), seed=9)
    third = torch.rand(2)
    assert not torch.equal(third, expected)
    seed_rank(9, Of(2, [None, None]))
    assert torch.equal(torch.rand(2), third)


WALL_TIME = "2026-11-25T04:00:00+00:00"
BEGUN_AT = datetime.fromisoformat(WALL_TIME).timestamp()


def started(**changes: object) -> StartLine:
    fields = {"time_seconds": 0.0, "step": 0, "micro_batch": 4, "baseline_bytes": 1, "wall_time": WALL_TIME}
    return StartLine.model_validate(fields | changes)


def test_a_restart_is_known_by_what_has_begun_since(directory):
    """Not by torchrun's count, which is each agent's own and leaves out restarts for another number of agents."""
    assert starts_since(directory.path, BEGUN_AT - 1) == 0
    directory.append(started())
    assert starts_since(directory.path, BEGUN_AT + 0.5) == 0  # what began was an earlier run in this directory
    assert starts_since(directory.path, BEGUN_AT - 0.5) == 1
    directory.append(started(restarts=1))
    assert starts_since(directory.path, BEGUN_AT - 0.5) == 2
    directory.prepared.unlink()  # another command has begun here, and nothing is ready
    assert starts_since(directory.path, BEGUN_AT - 0.5) == 0


def test_who_may_be_started_again(monkeypatch):
    monkeypatch.delenv("PLIMSOLL_SUPERVISOR", raising=False)
    assert not may_begin_anew()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for most, expected in (("2", True), ("1", False)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", most)
        assert may_begin_anew() == expected
    monkeypatch.setenv("PLIMSOLL_SUPERVISOR", "1")
    assert may_begin_anew()


def test_how_old_a_launcher_is():
    code = "import time; from plimsoll.run.ranked import launcher_age_seconds as age; print(time.time() - age())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    # psutil knows the second in which the machine was started, and not the part of it.
    assert 0 <= float(found.stdout) - psutil.Process().create_time() < 1.1


@pytest.mark.parametrize(
    ("kills", "rungs", "evidence"),
    [
        ({"one": 3, "other": 8}, (1, 0), "the kernel has killed processes for memory since the last start: 2 on other"),
        ({"one": 3, "other": 6}, (None, None), "torchrun has started all ranks again; no machine counts a kill"),
        ({}, (None, None), "torchrun has started all ranks again; no machine counts a kill"),
    ],
)
def test_after_a_kill_for_memory_all_ranks_begin_with_the_next_rung(directory, monkeypatch, kills, rungs, evidence):
    micro_batch_plan(Budget(), (4, 2)).save(directory.plan)
    directory.append(started(oom_kills={"one": 3, "other": 6}))
    monkeypatch.setattr("plimsoll.run.ranked.oom_kills_by_machine", lambda _: kills)
    assert begun_again(Ranks(), directory) == rungs
    death = directory.lines()[-1]
    assert isinstance(death, DeathLine)
    assert death.evidence.startswith(evidence)
    assert death.next_rung == (rungs[0] or 0)
    assert begun_again(Of(1, [rungs[0]]), directory) == rungs  # the first rank has read what happened


@pytest.mark.parametrize(("count", "here"), [(OomKills(7, is_whole_machine=False), {"this": 7}), (None, {})])
def test_each_machine_that_counts_kills_says_how_many(monkeypatch, count, here):
    monkeypatch.setattr("plimsoll.run.ranked.oom_kill_count", lambda: count)
    monkeypatch.setattr("socket.gethostname", lambda: "this")
    monkeypatch.delenv("RANK", raising=False)
    assert oom_kills_by_machine(Of(0, [("a", 2), ("b", None)])) == {}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "0")
    assert oom_kills_by_machine(Of(0, [("a", 2), ("b", None)])) == {"a": 2, **here}


def test_with_another_number_of_ranks_the_plan_is_made_again(directory):
    began = time.time() - launcher_age_seconds()
    directory.append(started(wall_time=datetime.fromtimestamp(began + 0.1, UTC).isoformat()))
    calls: list[str] = []
    for num_ranks, expected in ((2, []), (3, ["again"])):
        directory.write_job(job().model_copy(update={"ranks": num_ranks}))
        ranks = Two()
        found = prepared_by_first(
            ranks, directory.path, lambda: calls.append("made") or 0, lambda: calls.append("again") or 0
        )
        assert (found, calls) == ((0, 1), expected)


class Two(Ranks):
    """The first of two, of which the other says the same."""

    def __init__(self):
        super().__init__()
        self.world_size = 2

    def gather(self, value):
        return [value, value]
