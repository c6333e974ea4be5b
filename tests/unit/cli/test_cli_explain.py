"""`plimsoll explain`, with directories of runs written by hand."""

import gzip
import json
import re

import pytest

import watch_records
from evidence_records import MIB, empty_run, lines, step_line
from plimsoll.records import watch
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.run import RunHead
from plimsoll.training.run_directory import RunDirectory
from snapshots import training, write


@pytest.fixture
def make_run(tmp_path):
    def make(graphs=()):
        directory = RunDirectory.create(tmp_path / "ship", force=False)
        record = empty_run()
        RunHead(job={}, device=record.device, versions={}, fingerprint={}).save(directory.head)
        record.plan.save(directory.plan)
        for line in (*(step_line(step, used_bytes=(100 + step) * MIB) for step in range(1, 31)), *graphs):
            directory.append(line)
        return directory.path

    return make


def test_a_finding_ends_with_1(call, make_run):
    code, out, err = call("explain", make_run(lines()))
    assert (code, err) == (1, "")
    assert "model.history" in out
    assert "self.history.append(output.detach())" in out


def test_nothing_ends_with_0(call, make_run):
    code, out, err = call("explain", make_run())
    assert (code, err) == (0, "")
    assert "Nothing was found in 30 steps" in out


def test_json_is_the_record_and_nothing_else(call, make_run, tmp_path):
    code, out, _ = call("explain", make_run(lines()), "--json")
    (line,) = out.splitlines()
    assert (code, Diagnosis.from_json(line).findings[0].cause) == (1, "graph_kept")
    (tmp_path / "a.json").write_text(line)
    assert "model.history" in call("report", tmp_path / "a.json").out


def test_what_is_no_run_ends_with_2(refused, failed_as_json, tmp_path):
    assert "give the --out of `plimsoll train`" in refused("explain", tmp_path)
    assert failed_as_json("explain", tmp_path)["error"] == "RecordError"


def test_a_damaged_run_is_refused(refused, make_run):
    path = make_run()
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "graph"}) + "\n")
    assert "is not a metrics line" in refused("explain", path)


def test_a_snapshot_is_explained_whatever_its_size(call, refused, tmp_path, monkeypatch):
    path = write(tmp_path / "snapshot.pickle", training(5, leak=3 * MIB).as_dict())
    small = call("explain", path)
    assert (small.code, small.err) == (1, "")
    assert "allocations of train.py:12 are not freed: 3.0 MiB per step" in small.out
    monkeypatch.setattr("plimsoll.diagnose.source._LARGE_BYTES", 1)
    assert call("explain", path).out == small.out
    path.write_bytes(b"\x80\x02cos\nsystem\n.")
    assert "the operation GLOBAL, which is not supported" in refused("explain", path)


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "packed"])
def test_a_snapshot_is_explained_from_a_pipe(call, tmp_path, monkeypatch, packed):
    path = write(tmp_path / "standard input", training(5, leak=3 * MIB).as_dict())
    told = call("explain", path).out
    (tmp_path / "piped").write_bytes(packed(path.read_bytes()))
    with (tmp_path / "piped").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert call("explain").out == told


def test_the_recording_of_a_watch_is_explained_from_a_pipe(call, tmp_path, monkeypatch):
    path, record = tmp_path / "standard input", watch_records.killed()
    watch.begin(path, record.model_copy(update={"samples": (), "end": None}))
    for entry in (*record.samples, record.end):
        watch.append(path, entry)
    told = call("explain", path).out
    assert "killed" in told
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert call("explain", "-").out == told


def test_a_log_is_explained_from_a_file_and_from_a_pipe(call, tmp_path, monkeypatch):
    log = tmp_path / "train.log"
    log.write_text("epoch 1\nDefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.\n")
    code, out, err = call("explain", log)
    assert (code, err) == (1, "")
    assert "(cpu_allocator_linux)" in out
    assert "4.0 KiB" in out
    with log.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        code, out, _ = call("explain", "--json")
    assert code == 1
    event = json.loads(out)["event"]
    assert (event["kind"], event["tried_to_allocate"], event["line_number"]) == ("cpu_allocator_linux", 4096, 2)


def test_a_log_without_lack_of_memory_ends_with_0(call, tmp_path):
    (tmp_path / "train.log").write_text("CUDA error: device-side assert triggered\n")
    code, out, _ = call("explain", tmp_path / "train.log")
    assert code == 0
    assert "This is not an out-of-memory error." in out


JOB = """# a job for a GPU that is not here: its logits are most of what it needs
model: {architecture: lstm, embedding_size: 256, hidden_size: 256}
data: text.txt
tokenizer: {vocab_size: 8000}
sequence_length: 64   # tokens
batch_size: 16
"""
ON_CARD = ("--device", "rtx3060")


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB, encoding="utf-8")
    (tmp_path / "text.txt").write_text("too much to train its tokenizer for a look " * 30_000, encoding="utf-8")
    return path


@pytest.mark.long
def test_a_job_that_does_not_fit_is_written_with_what_makes_it_fit(call, job_file):
    out = job_file.with_name("smaller.yaml")
    code, shown, err = call("explain", job_file, *ON_CARD, "--budget", "330MiB", "--apply", "-o", out)
    assert code == 1
    assert re.fullmatch(rf"{re.escape(str(out))}: the job for .*=.*; train it with `plimsoll train .*yaml`\n", err)
    assert "Parts of the peak" in shown
    assert "1. " in shown
    assert out.read_text(encoding="utf-8") == f"{JOB}budget: {{device: 330MiB}}\n"


def test_a_job_that_fits_ends_with_0(call, job_file):
    code, out, _ = call("explain", job_file, *ON_CARD, "--budget", "1GiB", "--json")
    diagnosis = Diagnosis.from_json(out)
    assert (code, diagnosis.findings) == (0, ())
    assert diagnosis.shares


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("job.yaml", "--remedy", "2"), "--remedy 2 needs --apply, which writes a changed job: add --apply"),
        (("job.yaml", "-o", "a.yaml"), "a.yaml needs --apply, which writes a changed job: add --apply"),
        (("job.yaml", "--apply", "-o", "there.yaml"), "there.yaml exists already and is not overwritten"),
        (("job.yaml", "--apply", "-o", "job.yaml", "--force"), "give another -o\n"),
        (("job.yaml", "--apply", "-o", "a.txt"), "give -o a name that ends in .yaml"),
        (("job.yaml", "--apply", "-o", "gone/a.yaml"), "there is no folder gone"),
        (("job.yaml", "--budget", "much"), "--budget: cannot read 'much'"),
        (("train.log", "--apply"), "--apply is only for jobs and runs, and train.log is a text"),
        (("gone.yaml",), "there is no job file at gone.yaml"),
        (("gone", "--apply"), "gone is a text"),
        (("train.log", "--budget", "1GiB"), "--budget is only for jobs and runs"),
    ],
)
def test_what_is_refused_before_the_work(arguments, told, refused, job_file, monkeypatch):
    monkeypatch.chdir(job_file.parent)
    for name in ("there.yaml", "train.log"):
        (job_file.parent / name).write_text("MemoryError\n")
    assert told.strip() in refused("explain", *arguments)


def test_yaml_of_other_programs_is_a_text(call, tmp_path):
    pod = tmp_path / "pod.yaml"
    pod.write_text("apiVersion: v1\nstatus:\n  reason: OOMKilled\n  exitCode: 137\n")
    assert call("explain", pod).code == 1
