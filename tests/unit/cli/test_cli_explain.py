"""`plimsoll explain`, on directories of runs written by hand."""

import json

import pytest

from evidence_records import MIB, empty_run, lines, step_line
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.run import RunHead
from plimsoll.run.directory import RunDirectory
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
    assert "what train.py:12 allocates stays: 3.0 MiB per step" in small.out
    monkeypatch.setattr("plimsoll.cli.explain._LARGE_BYTES", 1)
    assert call("explain", path).out == small.out
    path.write_bytes(b"\x80\x02cos\nsystem\n.")
    assert "GLOBAL is none that a memory snapshot needs" in refused("explain", path)


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
