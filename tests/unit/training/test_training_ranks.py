"""The agreement of ranks before the first step: device, equality of jobs, checkpoint, random numbers."""

from __future__ import annotations

import random
import re
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
from plimsoll.device.cpu.cgroup import OomKills
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import DeviceError, FragmentedHeapError, InputError, OutOfMemoryError
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_plan
from plimsoll.records.run import CheckpointLine, DeathLine, StartLine
from plimsoll.step.failpoints import exhaust_memory
from plimsoll.training import checkpoint
from plimsoll.training.ranks import (
    begun_again,
    chosen,
    device_of_rank,
    launcher_age_seconds,
    may_begin_anew,
    oom_kills_by_machine,
    outside_of_steps,
    prepared_by_first,
    random_states,
    require_same,
    restore_random_state,
    seed_rank,
    starts_since,
)
from plimsoll.training.run_directory import RunDirectory

BACKEND = backend_for("cpu")


class Of(Ranks):
    """One of several ranks, with the values of the others."""

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


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "expected"), [(0, 1, "cuda:0"), (0, 2, "cuda:0"), (1, 2, "cuda:1"), (3, 8, "cuda:3")]
)
def test_a_rank_has_the_gpu_of_its_number_on_its_machine(monkeypatch, local_rank, num_gpus, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    rank = Of(2, ["cuda:0", "cuda:1"])  # on the second machine
    rank.local_rank = local_rank
    assert device_of_rank("cuda", rank) == expected
    assert device_of_rank("cuda", Ranks()) == "cuda"
    assert device_of_rank("cpu", Of(2, ["", ""])) == "cpu"


def test_a_rank_beyond_the_gpus_of_its_machine_has_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    rank = Of(2, ["cuda:0", "cuda:1"])
    rank.local_rank = 2
    with pytest.raises(DeviceError, match=r"ranks 2 of 3 have no GPU of their own \(this machine has 2\)"):
        device_of_rank("cuda", rank)


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


def test_one_that_trains_alone_compares_nothing(tmp_path):
    require_same(Ranks(), RunDirectory(tmp_path / "not there"), job())


@pytest.mark.parametrize(
    ("file", "name"), [("job.yaml", "job.yaml"), ("plan.json", "plan.json"), ("prepared.json", "the prepared data")]
)
def test_each_file_of_the_run_is_compared_by_what_is_in_it(directory, file, name):
    before = facts_of(directory, job())
    (directory.path / file).write_text("another")
    after = facts_of(directory, job())
    assert [one for one in before if before[one] != after[one]] == [name]
    assert re.fullmatch("[0-9a-f]{12}", after[name])
    assert {"torch", "transformers", "the code of plimsoll"} <= before.keys()
    assert "python" not in before  # random numbers do not depend on it


@pytest.mark.parametrize(
    "model", ["lstm", {"architecture": "lstm"}, "no_such_module_of_ranks:model", "folder_only:model"]
)
def test_a_model_that_is_not_made_by_a_file_of_ones_own_has_no_code(directory, tmp_path, monkeypatch, model):
    (tmp_path / "folder_only").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert facts_of(directory, job().model_copy(update={"model": model}))["the code of the model"] == "none"


def test_all_ranks_go_on_from_the_checkpoint_that_the_first_has_found(tmp_path):
    """It may be older than the newest checkpoint, which may be torn."""
    model = torch.nn.Linear(1, 1)
    fields = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "random_state": None, "keep": 3}
    for step in (10, 20):
        checkpoint.save(tmp_path, step, progress={"fingerprint": {}}, **fields)
    saved = checkpoint.load(tmp_path, {}, 10)
    assert chosen(Of(0, [None]), saved, tmp_path, {}) is saved
    assert chosen(Of(1, [10]), None, tmp_path, {}).step == 10
    assert chosen(Of(0, [None]), None, tmp_path, {}) is None
    assert chosen(Of(1, [None]), None, tmp_path, {}) is None


@pytest.mark.parametrize(
    ("seed", "rank", "of_torch", "of_numpy"),
    [
        (5, 2, 2_000_011, 2_000_011),
        (3_000_000_000, 1, 3_001_000_003, 3_001_000_003),
        (2**32, 1, 2**32 + 1_000_003, 1_000_003),  # numpy takes 32 bits
        (2**63 - 1, 1, 1_000_002, 1_000_002),  # and torch 63
    ],
)
def test_a_ranks_seed_is_the_same_in_every_start(seed, rank, of_torch, of_numpy):
    seed_rank(seed, Of(rank, [None] * rank))
    assert torch.initial_seed() == of_torch
    assert np.random.get_state()[1][0] == of_numpy
    assert random.random() == random.Random(of_torch).random()


def test_random_numbers_are_a_ranks_own_and_come_back():
    torch.manual_seed(0)
    seed_rank(0, Ranks())  # rank 0 draws the numbers of a single process
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


def test_a_checkpoint_of_several_ranks_has_the_state_of_each():
    torch.manual_seed(3)
    states = random_states(BACKEND, Two())
    expected = torch.rand(2)
    assert len(states["by_rank"]) == 2
    restore_random_state(BACKEND, states, Of(1, [None]), seed=9)
    assert torch.equal(torch.rand(2), expected)


WALL_TIME = "2026-11-25T04:00:00+00:00"
BEGUN_AT = datetime.fromisoformat(WALL_TIME).timestamp()


def started(**changes: object) -> StartLine:
    fields = {"time_seconds": 0.0, "step": 0, "micro_batch": 4, "baseline_bytes": 1, "wall_time": WALL_TIME}
    return StartLine.model_validate(fields | changes)


def test_a_restart_is_known_by_what_has_begun_since(directory):
    """torchrun's count does not help: each agent has its own, which omits restarts for another number of agents."""
    assert starts_since(directory.path, BEGUN_AT - 1) == 0
    directory.append(started())
    assert starts_since(directory.path, BEGUN_AT + 0.5) == 0  # an earlier run in this directory
    assert starts_since(directory.path, BEGUN_AT) == starts_since(directory.path, BEGUN_AT - 0.5) == 1
    directory.append(started(restarts=1))
    assert starts_since(directory.path, BEGUN_AT - 0.5) == 2
    directory.prepared.unlink()  # another command has started here, and nothing is ready
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


# Like a script that torchrun starts and that starts the rank.
BETWEEN = "import subprocess, sys; print(subprocess.run(sys.argv[1:], capture_output=True, text=True).stdout)"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("between", [[], [sys.executable, "-c", BETWEEN]], ids=["by itself", "by a script"])
def test_a_launcher_is_as_old_as_what_has_started_the_rank(between):
    code = "import time; from plimsoll.training.ranks import launcher_age_seconds as age; print(time.time() - age())"
    found = subprocess.run(
        [*between, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment(TORCHELASTIC_RUN_ID="1"),
    )
    # psutil knows the boot time of the machine in whole seconds only.
    assert 0 <= float(found.stdout) - psutil.Process().create_time() < 1.1


def test_where_ticks_are_not_counted_a_launcher_is_known_to_the_second(monkeypatch):
    by_ticks = launcher_age_seconds()
    monkeypatch.setattr("plimsoll.training.ranks.start_ticks", lambda pid: None)
    assert abs(launcher_age_seconds() - by_ticks) < 2


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"PLIMSOLL_SUPERVISOR": "1"}, FragmentedHeapError),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, FragmentedHeapError),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "3"}, OutOfMemoryError),
        ({}, OutOfMemoryError),
    ],
)
def test_where_memory_runs_out_outside_of_a_step_a_new_process_is_asked_for_if_there_can_be_one(
    monkeypatch, variables, error
):
    for name in ("PLIMSOLL_SUPERVISOR", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match="memory ran out outside of a step"):
        outside_of_steps(exhaust_memory, BACKEND)
    assert outside_of_steps(lambda: 7, BACKEND) == 7


@pytest.mark.parametrize(
    ("kills", "fallbacks", "evidence"),
    [
        ({"one": 3, "other": 8}, (1, 0), "the kernel has killed processes for memory since the last start: 2 on other"),
        ({"one": 3, "other": 6}, (None, None), "torchrun has started all ranks again; no machine counts a kill"),
        ({"one": 2, "new": 5}, (None, None), "torchrun has started all ranks again; no machine counts a kill"),
        ({}, (None, None), "torchrun has started all ranks again; no machine counts a kill"),
    ],
)
def test_after_a_kill_for_memory_all_ranks_begin_with_the_next_fallback(
    directory, monkeypatch, kills, fallbacks, evidence
):
    micro_batch_plan(Budget(), (4, 2)).save(directory.plan)
    directory.append(started(oom_kills={"one": 1, "other": 2, "gone": 0}))
    directory.append(started(oom_kills={"one": 3, "other": 6, "gone": 0}))
    monkeypatch.setattr("plimsoll.training.ranks.oom_kills_by_machine", lambda _: kills)
    assert begun_again(Ranks(), directory) == fallbacks
    death = directory.lines()[-1]
    assert isinstance(death, DeathLine)
    assert death.evidence.startswith(evidence)
    assert death.next_fallback == (fallbacks[0] or 0)
    assert begun_again(Of(1, [fallbacks[0]]), directory) == fallbacks  # rank 0 has read the record of the death


@pytest.mark.parametrize(
    ("in_force", "fallbacks", "next_micro_batch"),
    [
        (0, (1, 0), 4),
        (1, (2, 1), 2),
        (2, (2, 1), 2),  # there is no further fallback
        (7, (2, 1), 2),  # of an earlier plan with more fallbacks
    ],
)
def test_after_a_kill_the_ranks_leave_the_fallback_in_force(
    directory, monkeypatch, in_force, fallbacks, next_micro_batch
):
    micro_batch_plan(Budget(), (8, 4, 2)).save(directory.plan)
    directory.append(started(fallback=in_force, oom_kills={"one": 3}))
    directory.append(CheckpointLine(time_seconds=2.0, step=30, num_bytes=1))
    directory.append(CheckpointLine(time_seconds=5.0, step=40, num_bytes=1))
    monkeypatch.setattr("plimsoll.training.ranks.oom_kills_by_machine", lambda _: {"one": 4})
    assert begun_again(Ranks(), directory) == fallbacks
    death = directory.lines()[-1]
    assert (death.next_fallback, death.next_micro_batch) == (fallbacks[0], next_micro_batch)
    assert (death.time_seconds, death.restarted_from_step) == (5.0, 40)


def test_without_a_kill_the_fallback_in_force_stays(directory, monkeypatch):
    micro_batch_plan(Budget(), (8, 4, 2)).save(directory.plan)
    monkeypatch.setattr("plimsoll.training.ranks.oom_kills_by_machine", lambda _: {})
    told = []
    for fallback in (None, 1):
        if fallback is not None:
            directory.append(started(fallback=fallback))
        assert begun_again(Ranks(), directory) == (None, None)
        told.append(directory.lines()[-1])
    assert [(death.time_seconds, death.next_fallback, death.next_micro_batch) for death in told] == [
        (0, 0, 8),
        (0, 1, 4),
    ]


@pytest.mark.parametrize(("count", "here"), [(OomKills(7, is_whole_machine=False), {"this": 7}), (None, {})])
def test_each_machine_that_counts_kills_says_how_many(monkeypatch, count, here):
    monkeypatch.setattr("plimsoll.training.ranks.oom_kill_count", lambda: count)
    monkeypatch.setattr("socket.gethostname", lambda: "this")
    monkeypatch.delenv("RANK", raising=False)
    assert oom_kills_by_machine(Of(0, [("a", 2), ("b", None)])) == {}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "0")
    assert oom_kills_by_machine(Of(0, [("a", 2), ("b", None)])) == {"a": 2, **here}


def prepared(ranks, directory, codes=(0, 0)):
    """Return the exit codes that all ranks receive, and the functions that were called."""
    calls = []
    works = [lambda name=name, code=code: calls.append(name) or code for name, code in zip("pa", codes, strict=True)]
    return prepared_by_first(ranks, directory.path, *works), calls


def test_with_another_number_of_ranks_the_plan_is_made_again(directory):
    began = time.time() - launcher_age_seconds()
    directory.append(started(wall_time=datetime.fromtimestamp(began + 0.1, UTC).isoformat()))
    for num_ranks, code, calls in ((2, 0, []), (3, 5, ["a"]), (1, 5, ["a"])):
        directory.write_job(job().model_copy(update={"ranks": num_ranks}))
        assert prepared(Two(), directory, (9, 5)) == ((code, 1), calls)


@pytest.mark.parametrize("code", [0, 3])
def test_where_no_training_has_begun_the_first_rank_prepares_it_and_all_hear_how_that_ended(directory, code):
    directory.append(started(wall_time="2020-01-01T00:00:00+00:00"))  # in an earlier run
    directory.write_job(job().model_copy(update={"ranks": 2}))
    assert prepared(Two(), directory, (code, 9)) == ((code, 0), ["p"])


def test_a_training_goes_on_that_has_begun_since_the_first_agent_was_started(directory):
    """Agents of other machines may be older or younger, because a lost agent is replaced."""
    began = time.time() - launcher_age_seconds()
    directory.append(started(wall_time=datetime.fromtimestamp(began - 50, UTC).isoformat()))
    directory.write_job(job().model_copy(update={"ranks": 2}))
    assert [prepared(Two(age), directory) for age in (100, 0, -100)] == [((0, 1), []), ((0, 0), ["p"]), ((0, 0), ["p"])]


class Two(Ranks):
    """Rank 0 of two; rank 1 sends the same values, but its agent is older by `older_seconds`."""

    def __init__(self, older_seconds=0):
        super().__init__()
        self.world_size, self._older_seconds = 2, older_seconds

    def gather(self, value):
        return [value, value + self._older_seconds if isinstance(value, float) else value]

    def gather_agreed(self, value):
        return [value, value]
