"""What the training process has loaded, limited and said when it starts."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import plimsoll.training.loop
from plimsoll.planning.baseline import print_baseline
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Configuration, Plan, micro_batch_choice
from plimsoll.records.run import RunHead
from plimsoll.training.prepare import prepare_run
from plimsoll.training.run_directory import RunDirectory
from processes import run_program
from small_runs import small_job, train_here

NewRun = Callable[..., RunDirectory]


DEATH_SIGNAL = """
import ctypes
from plimsoll.processes.children import begin_worker
begin_worker()
number = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value)
"""


@pytest.mark.sampled(2)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells of the death of a parent")
@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        ({}, False),
        ({"PLIMSOLL_SUPERVISOR": str(os.getpid())}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"RANK": "0", "WORLD_SIZE": ""}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}, True),
        ({"RANK": "", "WORLD_SIZE": "2"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2", "PLIMSOLL_SUPERVISOR": "1"}, True),  # the launcher is its parent
    ],
)
def test_a_process_ends_with_its_supervisor_or_its_launcher_where_it_has_one(
    variables: dict[str, str], is_told: bool
) -> None:
    done = run_program(DEATH_SIGNAL, **variables)
    assert (done.returncode, done.stdout) == (0, f"{int(signal.SIGTERM) if is_told else 0}\n"), done.stderr


# Each job in a process of its own, forked from one that has not loaded transformers.
IMPORTS = """
import json, os, sys
from plimsoll.records.job import Job
from plimsoll.planning.baseline import load_libraries
for fields in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    load_libraries(Job.from_fields(json.loads(fields)))
    print("transformers" in sys.modules, flush=True)
    os._exit(0)
print("transformers" in sys.modules)
"""


@pytest.mark.long
def test_transformers_are_loaded_before_memory_is_limited_where_the_job_may_have_one() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"model": "lstm"}, False),
        ({"model": {"architecture": "gru"}}, False),
        ({"model": "gpt2"}, True),
        ({"model": "lstm", "distill": {"teacher": "nowhere"}}, True),
    ]
    done = run_program(IMPORTS, *(json.dumps({"data": "nowhere.txt"} | fields) for fields, _ in cases))
    assert done.stdout.split() == [*(str(is_loaded) for _, is_loaded in cases), "False"], done.stderr


OWN_MODEL = """
from torch import nn
def build(vocab_size, num_labels, end_id):
    print(vocab_size, num_labels, end_id)
    return nn.Linear(2, 2)
"""


@pytest.mark.parametrize(("task", "num_labels"), [("language-modeling", None), ("classification", 2)])
def test_what_a_process_takes_without_its_model_is_measured_with_all_that_a_model_of_ones_own_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str,
    num_labels: int | None,
) -> None:  # fmt: skip
    (tmp_path / "own_model_of_a_test.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model_of_a_test", raising=False)
    fields = {"model": "own_model_of_a_test:build", "task": task, "data": "nowhere.txt"}
    job = Job.from_fields(fields | {"tokenizer": {"vocab_size": 300}})
    monkeypatch.setattr(sys, "stdin", io.StringIO(job.to_json()))
    print_baseline()
    *given, num_bytes = capsys.readouterr().out.splitlines()
    assert given == [f"300 {num_labels} 0"]
    assert int(num_bytes) > 50 << 20


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_are_measured_with_what_their_exchanges_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_ranks: int
) -> None:
    joined: list[Any] = []
    join = dist.init_process_group

    def note_and_join(*args: Any, **kwargs: Any) -> None:
        joined.append(args[0])
        join(*args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", note_and_join)
    job = Job.from_fields({"model": "lstm", "data": "nowhere.txt", "ranks": num_ranks})
    monkeypatch.setattr(sys, "stdin", io.StringIO(job.to_json()))
    print_baseline()
    assert joined == ([] if num_ranks == 1 else ["gloo"])
    assert int(capsys.readouterr().out) > 50 << 20
    assert not dist.is_initialized()


def test_a_plan_with_fewer_fallbacks_than_the_last_process_had_is_continued(new_run: NewRun) -> None:
    directory = new_run(steps=1)
    train_here(directory, fallback=3)
    directory.write_job(Job.from_yaml(directory.job, ("steps=2",)))
    plan = Plan.load(directory.plan)
    plan.model_copy(update={"fallbacks": plan.fallbacks[:2]}).save(directory.plan)
    train_here(directory, resume=True)
    assert directory.last_step() == 2


@pytest.mark.parametrize(
    ("budget", "is_limited"),
    [({}, False), ({"device": "4GiB"}, True), ({"host": "4GiB"}, False)],
    ids=["none", "device", "host of a GPU"],
)
def test_steps_are_done_inside_the_budget_of_the_device(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, budget: dict[str, str], is_limited: bool
) -> None:
    def note_limit(*args: Any) -> None:
        limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
        note_step(*args)

    limits: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_DATA)
    note_step = plimsoll.training.loop.note_step
    monkeypatch.setattr(plimsoll.training.loop, "note_step", note_limit)
    train_here(new_run(steps=1, budget=budget))
    assert [limit != before[0] for limit in limits] == [is_limited]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_what_is_trained_is_told_by_the_step_unless_it_is_quiet(
    new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(new_run("quiet", steps=1))
    assert capsys.readouterr().err == ""
    train_here(new_run("told", steps=1), quiet=False)
    *_, first, second = filter(None, capsys.readouterr().err.splitlines())  # before them, who keeps the machine busy
    assert first.startswith("step 1/1 ")
    assert "tokens/s" in first
    assert second.startswith("step 1: validation loss ")


def test_a_classifier_is_timed_in_samples_and_says_how_many_texts_lost_their_end(
    new_run: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label, text in (("ham", "ship"), ("spam", "coin " * 40)):
        (tmp_path / "texts" / label).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "texts" / label / f"{number}.txt").write_text(f"{text} {number}")
    data = {"train": str(tmp_path / "texts"), "on_the_fly": True, "long_texts": "truncate", "workers": 0}
    train_here(new_run(task="classification", data=data, steps=1, tokenizer={"vocab_size": 270}), quiet=False)
    *_, first, second = filter(None, capsys.readouterr().err.splitlines())  # before them: that the machine is busy
    assert "samples/s" in first
    assert second == "4 texts were truncated to 32 tokens as they were read"


def test_a_loss_over_all_of_a_sample_has_no_reach_to_tell(new_run: NewRun) -> None:
    directory = new_run(steps=1)
    train_here(directory)
    assert RunHead.load(directory.head).gradient_reach is None


def test_in_streams_truncated_gradients_reach_as_far_as_their_segments(text: Path, tmp_path: Path) -> None:
    data = {"train": str(text), "order": "streams", "validation": 0.1}
    directory = RunDirectory.create(tmp_path / "run", force=False)
    directory.write_job(small_job(text, data=data, model={"architecture": "gru"}, allow=["truncated_bptt"], steps=1))
    choices = (micro_batch_choice(8), Choice(technique="truncated_bptt", options={"steps": 8}))
    Plan(budget=Job.from_yaml(directory.job).budget, fallbacks=(Configuration(choices=choices),)).save(directory.plan)
    prepare_run(directory.path, tmp_path / "cache", quiet=True)
    train_here(directory)
    reach = RunHead.load(directory.head).gradient_reach
    assert reach is not None
    assert reach.most_tokens == 8
