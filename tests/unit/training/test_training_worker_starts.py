"""What the processes before and of a training do at their start, and what they say of it."""

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
from plimsoll.data.sketch import sketch_texts
from plimsoll.errors import CheckpointError, DataError, EmbeddingError, InputError, RecordError
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.planning.baseline import print_baseline
from plimsoll.planning.facts import facts_of
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Configuration, Plan, Trial, micro_batch_choice, micro_batch_plan
from plimsoll.records.prepared import Prepared, PreparedText
from plimsoll.records.run import GradientReach, RunHead
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.worker import data_sentence, plan_run, prepare_run
from processes import run_program
from small_runs import small_job, train_here

NewRun = Callable[..., RunDirectory]

DEATH_SIGNAL = """
import ctypes
from plimsoll.files.child_processes import begin_worker
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


def prepared_of(*, reach: GradientReach | None = None, labels: tuple[str, ...] = (), **changes: Any) -> Prepared:
    fields = {"corpus_key": "k", "index_folder": "i", "num_documents": 1234, "num_bytes": 99_999, "num_samples": 2345}
    train = PreparedText.model_validate(fields | {"num_skipped": 0, "skipped": ()} | changes)
    return Prepared(
        key="k", train=train, tokenizer_folder="t", vocab_size=300, end_id=0, label_names=labels, gradient_reach=reach
    )


PLAIN = "data: 1,234 texts; 2,345 samples"


@pytest.mark.parametrize(
    ("prepared", "sentence"),
    [
        (prepared_of(), PLAIN),
        (prepared_of(num_tokens=34_567), "data: 1,234 texts; 34,567 tokens; 2,345 samples"),
        (prepared_of(labels=("a", "b", "c"), labels_folder="l"), f"{PLAIN}; 3 classes"),
        (prepared_of(labels=("O", "B-PER", "I-PER")), f"{PLAIN}; 3 tags"),
        (prepared_of(labels=("B-PER", "PER"), labels_folder="l"), f"{PLAIN}; 2 classes"),  # which have no entities
        (prepared_of(num_long_texts=1111), f"{PLAIN}; 1,111 texts longer than a sample, cut into windows"),
        (
            prepared_of(num_long_texts=1111, num_truncated=1111, num_dropped_tokens=5678),
            f"{PLAIN}; 1,111 texts longer than a sample, 5,678 tokens of them dropped",
        ),
        (prepared_of(num_lost_words=1001), f"{PLAIN}; 1,001 words without a token, whose tags are not learnt"),
        (prepared_of(num_cut_inside=1002), f"{PLAIN}; 1,002 windows that end at no border"),
        (
            prepared_of(reach=GradientReach(most_tokens=2047, mean_tokens=1024.26)),
            f"{PLAIN}; gradients reach back 1,024.3 tokens on average, 2,047 at most",
        ),
        (
            prepared_of(num_skipped=1003, skipped=("a.txt: torn", "b.txt: torn")),
            f"{PLAIN}; 1,003 files or rows left out, the first: a.txt: torn",
        ),
    ],
)
def test_what_is_trained_on_is_said_in_a_line_and_what_is_not(prepared: Prepared, sentence: str) -> None:
    assert data_sentence(prepared) == sentence


def test_data_are_prepared_anew_unless_it_is_again_and_quietly_if_asked_to(
    new_run: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = new_run()
    expected = Prepared.load(directory.prepared)
    directory.prepared.unlink()
    prepare_run(directory.path, tmp_path / "cache", quiet=True)
    assert capsys.readouterr().err == ""
    assert Prepared.load(directory.prepared).key == expected.key
    directory.prepared.unlink()
    with pytest.raises(RecordError, match=r"prepared\.json"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True, again=True)


@pytest.mark.parametrize(
    ("pins", "forbids"), [(("packing",), ()), ((), ("no_such_technique",))], ids=["pinned", "forbidden"]
)
def test_a_wish_that_cannot_be_is_refused_before_the_data_are_prepared(
    new_run: NewRun, tmp_path: Path, pins: tuple[str, ...], forbids: tuple[str, ...]
) -> None:
    directory = new_run()
    with pytest.raises(InputError):
        prepare_run(directory.path, tmp_path / "cache", quiet=True, pins=pins, forbids=forbids)
    assert not (tmp_path / "cache").exists()


def test_what_the_data_are_too_little_for_is_said_before_a_plan_is_made(new_run: NewRun, tmp_path: Path) -> None:
    directory = new_run(batch_size=5000)
    with pytest.raises(DataError, match="5000"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True)


def test_a_plan_is_of_what_was_prepared_also_one_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job asks for 8,000 tokens, and its text gives 261, which only who reads it knows."""
    monkeypatch.setattr("plimsoll.data.sketch.FEW_BYTES", 0)
    (tmp_path / "text.txt").write_text("word " * 800)
    job = small_job(tmp_path / "text.txt", tokenizer={}, budget={"device": "2GiB"})
    directory = RunDirectory.create(tmp_path / "run", force=False)
    directory.write_job(job)
    given = micro_batch_plan(job.budget, (8,))
    for vocabulary, longest in (("8000", "32"), ("261", "8")):
        made_for = {"vocabulary": vocabulary, "labels": "None", "tokens of the longest row": longest}
        given.model_copy(update={"made_for": made_for}).save(directory.plan)
        with pytest.raises(InputError, match="leave --plan out"):
            prepare_run(directory.path, tmp_path / "cache", quiet=True)
        assert not directory.prepared.exists()
    given.save(directory.plan)
    prepare_run(directory.path, tmp_path / "cache", quiet=True, pins=("chunked_loss",))
    with pytest.raises(InputError, match="has 261 outputs"):
        plan_run(directory.path, None, ("chunked_loss",), (), quiet=True)


def test_word_vectors_must_be_the_same_when_a_run_goes_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = tmp_path / "vectors.txt"
    before = "ship 1 2 3 4 5 6 7 8\nline 8 7 6 5 4 3 2 1\n"
    vectors.write_text(before)
    directory = RunDirectory.create(tmp_path / "run", force=False)
    tokenizer = {"train": "words", "vocab_size": 300}
    directory.write_job(small_job(text, tokenizer=tokenizer, embeddings={"path": str(vectors)}))
    micro_batch_plan(Budget(), (8,)).save(directory.plan)
    prepare_run(directory.path, tmp_path / "cache", quiet=False)
    first = Prepared.load(directory.prepared)
    assert first.vectors_digest is not None
    assert first.vectors_folder is not None
    assert [line[:5] for line in capsys.readouterr().err.splitlines()[-2:]] == ["data:", "vecto"]
    prepare_run(directory.path, tmp_path / "cache", quiet=True, again=True)
    again = Prepared.load(directory.prepared)
    assert again.model_copy(update={"peak_bytes": first.peak_bytes}) == first  # which is measured
    vectors.write_text("ship 2 2 3 4 5 6 7 8\nline 8 7 6 5 4 3 2 1\n")
    with pytest.raises(EmbeddingError, match=rf"then {first.vectors_digest}\) are not what they were: put the file"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True, again=True)
    prepare_run(directory.path, tmp_path / "cache", quiet=True)
    assert Prepared.load(directory.prepared).vectors_digest != first.vectors_digest
    vectors.write_text(before)
    with pytest.raises(EmbeddingError, match="are not what they were"):
        prepare_run(directory.path, tmp_path / "cache", quiet=True, again=True)


def given_plan(directory: RunDirectory, path: Path) -> Plan:
    """Write a plan of two fallbacks that was made for the job of a run, under a budget that the job does not name."""
    job = Job.from_yaml(directory.job)
    fallbacks = tuple(Configuration(choices=(micro_batch_choice(size),)) for size in (4, 2))
    changes = {"made_for": facts_of(job, sketch_texts(job), CpuLowering().name), "fallbacks": fallbacks}
    plan = Plan.load(directory.plan).model_copy(update=changes)
    plan.save(path)
    return plan


@pytest.mark.parametrize("quiet", [True, False])
def test_a_plan_that_is_given_is_kept_and_its_first_rung_said(
    new_run: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    directory = new_run()
    plan = given_plan(directory, tmp_path / "plan.json")
    plan_run(directory.path, tmp_path / "plan.json", (), (), quiet)
    assert Plan.load(directory.plan) == plan
    plan.model_copy(update={"trial": Trial(seconds=6.5)}).save(tmp_path / "tried.json")
    plan_run(directory.path, tmp_path / "tried.json", (), (), quiet=True)
    assert Plan.load(directory.plan).trial.left_out
    said = "plan: micro_batch=4. Nothing was predicted: what memory allows is found while it trains.\n"
    assert capsys.readouterr().err == ("" if quiet else said)
    with pytest.raises(CheckpointError):
        plan_run(directory.path, tmp_path / "plan.json", (), (), quiet, goes_on=True)


def test_a_plan_that_still_holds_is_kept_without_a_word(new_run: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    directory = new_run(steps=1)
    plan = given_plan(directory, directory.plan)
    train_here(directory)
    plan_run(directory.path, None, (), (), quiet=False, goes_on=True, keep=True)
    assert Plan.load(directory.plan) == plan
    assert capsys.readouterr().err == ""


def test_a_plan_with_fewer_rungs_than_the_last_process_had_is_gone_on_with(new_run: NewRun) -> None:
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
