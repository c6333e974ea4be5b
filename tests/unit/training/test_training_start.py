"""`plimsoll train` before a process trains: the files that it writes, and the processes that it starts, in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import CheckpointError, InputError, JobError
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import Candidate, Choice, Configuration, Plan, micro_batch_choice, micro_batch_plan
from plimsoll.training import start as starting
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.start import TrainRequest, start

Started = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("A few words.\n" * 99)
    (tmp_path / "job.yaml").write_text("model: lstm\ndata: text.txt\nbatch_size: 4\nbudget: 1GiB\ndevice: cpu\n")
    return tmp_path / "job.yaml"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return `started(**codes)`, which lists the requested processes; each exits with 0 or with its given code."""

    def become(**codes: int) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def process(name: str) -> Callable[..., int]:
            def run(directory: RunDirectory, *arguments: Any, **options: Any) -> int:
                asked.append((name, *arguments, *options.values()))
                return codes.get(name, 0)

            return run

        for name in ("prepare_data", "make_plan", "supervise"):
            monkeypatch.setattr(starting, name, process(name))
        return asked

    return become


def test_the_budget_is_kept_as_bytes_in_the_place_of_the_jobs(job_file: Path, tmp_path: Path, started: Started) -> None:
    asked, out = started(), tmp_path / "a"
    assert start(TrainRequest(job_file=job_file, out=out, budget_bytes=2 << 30, changes=("steps=3",), quiet=True)) == 0
    job = Job.from_yaml(out / "job.yaml")
    assert (job.budget, job.steps) == (Budget(device_bytes=2 << 30), 3)
    assert Plan.load(out / "plan.json").budget == job.budget
    assert asked == [
        ("prepare_data", out / "data", True, ()),
        ("make_plan", (), True),
        ("supervise", (), True, 1),
    ]


def test_what_is_asked_of_the_plan_goes_to_the_processes_before_the_training(
    job_file: Path, tmp_path: Path, started: Started
) -> None:
    asked = started()
    request = TrainRequest(
        job_file=job_file, out=tmp_path / "a", pins=("micro_batch=2",), forbids=("heap",), trial=False, cache=tmp_path
    )
    assert start(request) == 0
    constraints = ("--pin", "micro_batch=2", "--forbid", "heap")
    assert asked == [
        ("prepare_data", tmp_path, False, constraints),
        ("make_plan", constraints, False),
        ("supervise", ("--no-trial",), False, 1),
    ]


def test_a_plan_that_is_given_is_read_before_the_data_are_prepared(
    job_file: Path, tmp_path: Path, started: Started
) -> None:
    asked = started(make_plan=2)
    Plan(budget=Budget(), fallbacks=()).save(tmp_path / "plan.json")
    assert start(TrainRequest(job_file=job_file, out=tmp_path / "a", given_plan=tmp_path / "plan.json")) == 2
    assert asked == [("make_plan", ("--given", str(tmp_path / "plan.json")), False)]


@pytest.mark.parametrize("place", ["fallbacks", "candidates"])
def test_a_plan_with_a_technique_that_is_not_installed_is_refused_before_anything_is_made(
    job_file: Path, tmp_path: Path, started: Started, place: str
) -> None:
    asked, plan = started(), micro_batch_plan(Budget(), [4, 2])
    strange = Configuration(choices=(micro_batch_choice(2), Choice(technique="rests")))
    added = (*plan.fallbacks, strange) if place == "fallbacks" else (Candidate(configuration=strange),)
    plan.model_copy(update={place: added}).save(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"plan\.json cannot be used here: there is no technique `rests`.*install the"):
        start(TrainRequest(job_file=job_file, out=tmp_path / "a", given_plan=tmp_path / "plan.json"))
    assert asked == []
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "request_fields", [{"has_plan": False}, {"changes": ("budget={}",)}], ids=["no plan", "no budget"]
)
def test_without_a_budget_or_a_plan_nothing_is_planned(
    job_file: Path, tmp_path: Path, started: Started, request_fields: dict[str, Any]
) -> None:
    asked = started(supervise=5)
    assert start(TrainRequest(job_file=job_file, out=tmp_path / "a", **request_fields)) == 5
    assert [name for name, *_ in asked] == ["prepare_data", "supervise"]


def test_a_run_goes_on_with_another_budget_and_what_is_refused_is_not_kept(
    new_run: Callable[..., RunDirectory], started: Started
) -> None:
    directory = new_run(device="cpu")
    before = directory.job.read_bytes()
    assert started(supervise=InputError.exit_code) == []
    request = TrainRequest(out=directory.path, resume=True, budget_bytes=3 << 30)
    assert start(request) == InputError.exit_code
    assert directory.job.read_bytes() == before
    asked = started()
    assert start(request) == 0
    assert asked == [("supervise", ("--resume",), False, 1)]
    assert Job.from_yaml(directory.job).budget == Plan.load(directory.plan).budget == Budget(device_bytes=3 << 30)


def test_an_error_of_the_training_process_leaves_the_job_as_it_was(
    new_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise CheckpointError("torn: give another")

    directory = new_run()
    before = directory.job.read_bytes()
    monkeypatch.setattr(starting, "_prepare_again", fail)
    with pytest.raises(CheckpointError):
        start(TrainRequest(out=directory.path, resume=True, changes=("seed=5",)))
    assert directory.job.read_bytes() == before


def test_fewer_steps_than_are_done_are_refused(
    new_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDirectory, "last_saved_step", lambda _: 9)
    with pytest.raises(JobError, match="steps is 2, but 9 are done"):
        start(TrainRequest(out=new_run().path, resume=True, changes=("steps=2",)))


def test_a_number_of_processes_is_not_for_a_rank_and_torchrun_says_which_rank(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = TrainRequest(job_file=job_file, out=tmp_path / "a", num_ranks=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE=2 is in the environment and RANK is not"):
        start(TrainRequest(job_file=job_file, out=tmp_path / "a"))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="--nproc 2 starts processes, but torchrun has started 2"):
        start(request)
