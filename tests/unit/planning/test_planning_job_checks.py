"""Checks of a job: they report all its faults at once, in the messages of later refusals, and without torch."""

import re
import subprocess
import sys

import pytest
import yaml
from tests.processes import environment, run_program

from plimsoll.data.quick_facts import labels_seen
from plimsoll.errors import BudgetError, DataError, InputError, JobError
from plimsoll.models.assemble import require_buildable
from plimsoll.models.names import require_technique
from plimsoll.planning.job_checks import LEAST_PROCESS_BYTES, require_micro_batch, require_sound
from plimsoll.planning.plan import plan_job
from plimsoll.planning.predict_job import predict_job
from plimsoll.records.job import Job
from plimsoll.records.plan import parse_pin
from plimsoll.techniques import TECHNIQUES

MIB = 1 << 20

FAULTS = {
    "architecture": ({"model": {"architecture": "gtp2"}}, JobError, "architecture `gtp2`; did you mean `gpt2`"),
    "field": ({"model": {"architecture": "gpt2", "n_layr": 2}}, JobError, "no field `n_layr`; did you mean `n_layer`"),
    "own field": (
        {"model": {"architecture": "gpt2", "use_cache": True}},
        JobError,
        "`use_cache` of `gpt2` is set from",
    ),
    "folder": ({"model": "gpt2"}, JobError, "no folder gpt2; for a new model write"),
    "optimizer": ({"optimizer": "adamv"}, JobError, "no `adamv` in torch.optim; did you mean `adam"),
    "argument": ({"optimizer": {"l": 3}}, JobError, "`adamw` has no argument `l`"),
    "warm-up": ({"optimizer": {"warmup_steps": 9}, "steps": 3}, JobError, "a warm-up of 9 steps is longer than"),
    "text": ({"data": "nowhere.txt"}, DataError, "no file or folder .*nowhere.txt: check the path"),
    "validation": (
        {"data": {"train": "text.txt", "validation": "gone.txt"}},
        DataError,
        "no file or folder .*gone.txt",
    ),
    "tokenizer": ({"tokenizer": "gone"}, DataError, "there is no tokenizer at .*gone"),
    "vectors": ({"embeddings": "gone.txt"}, JobError, "embeddings: .*gone.txt"),
    "teacher": ({"distill": "gone"}, JobError, "distill.teacher: there is no model in .*gone"),
    "labels": ({"task": "classification"}, JobError, "at least 2 labels, but the data have 1"),
    "column": ({"task": "classification", "data": {"train": "rows.jsonl", "label": "clas"}}, DataError, "clas"),
    "pin": ({"pin": "heeap=never"}, InputError, "no technique `heeap`; did you mean `heap`"),
    "budget": (
        {"budget": "100MiB", "device": "cpu"},
        BudgetError,
        "a budget of 100.0 MiB is too small for any training",
    ),
}


@pytest.fixture
def job(tmp_path):
    """Return `job(**changes)`, which is valid except for the changes."""
    (tmp_path / "text.txt").write_text("A text.\nAnother one.\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "One.", "class": "a"}\n{"text": "Two.", "class": "b"}\n')

    def make(**changes):
        return Job.from_plain({"model": "lstm", "data": "text.txt"} | changes, tmp_path)

    return make


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_said_as_the_kind_it_is(job, name):
    changes, kind, message = FAULTS[name]
    with pytest.raises(InputError, match=message) as refused:
        require_sound(job(**changes))
    assert type(refused.value) is kind


def test_what_is_sound_passes(job):
    require_sound(job())
    require_sound(job(task="classification", data={"train": "rows.jsonl", "label": "class"}), "rtx3060", 8 << 30)
    require_sound(job(budget="116MiB", device="cpu"), pins=[parse_pin("heap=never")], forbids=["lora"])


def test_a_file_that_can_only_be_read_as_a_whole_is_left_to_who_reads_it(job, tmp_path, monkeypatch):
    (tmp_path / "rows.json").write_text('[{"text": "One.", "class": "a"}, {"text": "Two.", "class": "b"}]')
    of = job(task="classification", data={"train": "rows.json", "label": "class"})
    assert labels_seen(of) == 2
    monkeypatch.setattr("plimsoll.data.quick_facts.open_corpus", None)
    require_sound(of)


def test_all_faults_are_said_at_once(job):
    changes = {}
    for name in ("architecture", "argument", "text", "pin"):
        changes |= FAULTS[name][0]
    with pytest.raises(JobError) as refused:
        require_sound(job(**changes), "rtx306", pins=[parse_pin("chekpointing=all")])
    first, *lines = str(refused.value).splitlines()
    assert first == "the job has 6 faults: correct each of them"
    for line, word in zip(lines, ["gtp2", "nowhere", "`l`", "chekp", "heeap", "rtx306"], strict=True):
        assert word in line


@pytest.mark.parametrize("name", ["architecture", "field", "own field", "folder", "optimizer", "argument", "warm-up"])
def test_what_would_refuse_it_later_says_the_same(job, name):
    faulty = job(**FAULTS[name][0])
    said = []
    for check in (require_sound, require_buildable):
        with pytest.raises(JobError) as refused:
            check(faulty)
        said.append(str(refused.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("ask", [predict_job, plan_job])
def test_programs_are_told_of_all_faults_too_but_may_make_up_the_data(job, ask):
    with pytest.raises(JobError, match=r"the job has 2 faults.*\n.*gtp2.*\n.*`l`"):
        ask(job(**FAULTS["architecture"][0] | FAULTS["argument"][0] | FAULTS["text"][0]), device="rtx3060")


def test_names_of_techniques_are_those_there_are():
    for name in TECHNIQUES:
        require_technique(name)
    with pytest.raises(InputError) as refused:
        require_technique("?")
    assert set(re.findall(r"\w+", str(refused.value).partition("known here: ")[2])) == set(TECHNIQUES)


def test_what_a_job_allows_has_a_name_there_is(job):
    require_sound(job(allow=["lora", "recut_loss"]))
    with pytest.raises(JobError, match=r"allow: `quantize` is unknown; known here: recut_batch"):
        require_sound(job(allow="quantize"))


@pytest.mark.parametrize(
    ("device", "limit_bytes", "is_refused"),
    [("cpu", 115 * MIB, True), ("cpu", 116 * MIB, False), ("rtx3060", 50 * MIB, False), ("cpu", None, False)],
)
def test_a_budget_is_of_the_process_on_a_processor_only(job, device, limit_bytes, is_refused):
    try:
        require_sound(job(), device, limit_bytes)
    except BudgetError:
        assert is_refused
    else:
        assert not is_refused


@pytest.mark.cold
def test_every_process_with_torch_takes_more_than_the_least():
    program = "import torch; from plimsoll.device.process import private_bytes; print(private_bytes())"
    assert int(run_program(program).stdout) > LEAST_PROCESS_BYTES


@pytest.mark.cold
@pytest.mark.parametrize("command", ["predict", "plan", "train", "explain"])
def test_commands_refuse_without_torch(job, tmp_path, command):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"model": {"architecture": "gtp2"}, "data": "nowhere.txt"}))
    program = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    program += "from plimsoll.cli.main import main; main()"
    arguments = [command, str(tmp_path / "job.yaml"), *(["--out", str(tmp_path / "run")] if command == "train" else [])]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert "the job has 2 faults" in done.stderr
    assert "did you mean `gpt2`" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("ranks", "most"), [(1, 8), (2, 4)])
def test_a_micro_batch_is_a_part_of_what_a_rank_has(ranks, most):
    job = Job.from_fields({"model": "lstm", "data": "a.txt", "batch_size": 8, "ranks": ranks})
    for size in (None, 1, most):
        require_micro_batch(size, job)
    with pytest.raises(InputError, match=rf"give 1 to {most}, or change the batch with --set batch_size={8 + ranks}"):
        require_micro_batch(most + 1, job)
