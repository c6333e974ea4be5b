"""Predictions against recordings of GPUs: all files of tests/recordings, and the code that makes and compares them."""

import copy
import gzip
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the loop and the comparison are shared with the programs in benchmarks/

from benchmarks import predict_gpu_recordings  # noqa: E402
from benchmarks.gpu import cases, compare, files, meter, record  # noqa: E402
from benchmarks.gpu.cases import Case  # noqa: E402

MOST_CASES = 7  # per recording in the default run: the first are the bases; `-m slow` runs all
HEADER = {
    "device": "a GPU that is not there", "capability": [9, 0], "total_bytes": 80 << 30, "recorded": "2026-11-21",
    "torch": torch.__version__, "transformers": transformers.__version__, "environment": {},
}  # fmt: skip
GRU = Case("gru-cls", 4, 12, tiny=True)
GPT2 = Case("gpt2", 2, 16, tiny=True)


# -- the files ---------------------------------------------------------------------------------------------------------


# Rows of the H200's recording with known deviations. In three trainings a segment of 90 to 144 MiB just fits into free
# memory, or just does not; two limits are between such sums.
KNOWN = {
    "bert-mlm-16x77-fp32-adamw", "bert-cls-8x128-fp32-adamw", "llama-4x512-fp32-adamw-chunked",
    "gpt2-8x256-bf16-adamw@0.97", "gpt2-8x256-fp32-adamw-checkpointing@0.97",
}  # fmt: skip


def check(path: Path, most_cases: int | None) -> None:
    recording = files.read_recording(path)
    rows = compare.comparable(recording)
    assert rows, f"{path} has nothing to compare"
    compared = compare.compare(recording, compare.of_first_cases(rows, most_cases or len(rows)))
    print(compare.versions_differ(recording["header"]))
    print(compare.table(compared))
    judged = [one for one in compared if one.id not in KNOWN]
    faults = [fault for summary in compare.summarize(judged) for fault in summary.faults]
    assert not faults, "\n".join([compare.versions_differ(recording["header"]), *faults])
    mended = [one.id for one in compared if one.id in KNOWN and not compare.summarize([one])[0].faults]
    assert not mended, f"{mended} are near what was recorded: take them out of KNOWN"


def each_recording() -> list:
    none = pytest.param(None, marks=pytest.mark.skip(reason="no recording lies here: see tests/recordings/README.md"))
    return [pytest.param(path, id=path.stem) for path in files.recordings()] or [none]


@pytest.mark.parametrize("path", each_recording())
def test_predictions_are_near_what_the_gpu_did(path):
    check(path, MOST_CASES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", each_recording())
def test_all_predictions_are_near_what_the_gpu_did(path):
    check(path, None)


# -- a recording that the test makes -----------------------------------------------------------------------------------


def row_of(case: Case, run_id: str = "", limit_bytes: int | None = None) -> dict:
    """Return the row of a GPU whose memory equals the prediction."""
    predicted = compare.predict(case, HEADER, limit_bytes=limit_bytes)
    return {
        "id": run_id or case.id,
        "kind": "shared" if limit_bytes is None else "limited",
        "case": case.to_dict(),
        "status": "oom" if predicted.is_oom else "ok",
        "limit_bytes": limit_bytes,
        "before_allocated_bytes": 0,
        "peak_allocated_bytes": predicted.peak_allocated_bytes,
        "peak_reserved_bytes": predicted.peak_reserved_bytes,
    }


@pytest.fixture(scope="module")
def synthetic() -> dict:
    rows = [row_of(GPT2), row_of(GRU)]
    rows += [row_of(GPT2, f"{GPT2.id}@{share}", int(rows[0]["peak_reserved_bytes"] * share)) for share in (0.3, 1.0)]
    rows.append({"id": "failed", "kind": "shared", "case": GRU.to_dict(), "status": "error", "limit_bytes": None})
    rows.append({"id": "probe:kernels", "kind": "probe", "rows": []})
    return {"format": files.FORMAT, "header": HEADER, "runs": rows}


def written(recording: dict, folder: Path) -> Path:
    path = folder / "synthetic.json.gz"
    files.write_recording(path, recording)
    assert [each.name for each in folder.iterdir()] == [path.name]  # no half-written file is left
    return path


def test_a_recording_with_the_predicted_numbers_passes(synthetic, tmp_path):
    assert [row["status"] for row in synthetic["runs"][:4]] == ["ok", "ok", "oom", "ok"]
    assert len(compare.comparable(synthetic)) == 4
    check(written(synthetic, tmp_path), None)


@pytest.mark.parametrize("name", ["allocated", "reserved"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("factor", [0.75, 1.3])
def test_a_number_that_is_off_by_a_quarter_is_found(synthetic, tmp_path, name, row, factor):
    recording = copy.deepcopy(synthetic)
    recording["runs"][row][f"peak_{name}_bytes"] *= factor
    with pytest.raises(AssertionError, match=rf"{name}, {recording['runs'][row]['id']} is off by"):
        check(written(recording, tmp_path), None)


def test_a_wrong_verdict_is_found(synthetic, tmp_path):
    recording = copy.deepcopy(synthetic)
    recording["runs"][2]["status"] = "ok"
    with pytest.raises(AssertionError, match=r"1 of 2 verdicts are wrong.*@0\.3"):
        check(written(recording, tmp_path), None)


def test_a_recording_of_another_format_is_refused(synthetic, tmp_path):
    with pytest.raises(ValueError, match="has format 0, and 1 is read: record it again"):
        files.read_recording(written(synthetic | {"format": 0}, tmp_path))


def test_the_benchmark_prints_the_figures(synthetic, tmp_path, capsys):
    assert predict_gpu_recordings.main([str(written(synthetic, tmp_path))]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    exact = {"median": 0, "p90": 0, "worst": 0, "in_range": 1}
    assert json.loads(last)["synthetic.json.gz"]["transformers"] == {
        "runs": 3, **{f"{name}_{key}": value for name in ("allocated", "reserved") for key, value in exact.items()},
        "verdicts": 2, "wrong_verdicts": 0, "faults": 0,
    }  # fmt: skip
    synthetic["runs"][0]["peak_allocated_bytes"] *= 2
    try:
        assert predict_gpu_recordings.main([str(written(synthetic, tmp_path))]) == 1
    finally:
        synthetic["runs"][0]["peak_allocated_bytes"] //= 2


def test_the_benchmark_says_that_there_is_no_recording(monkeypatch, tmp_path, capsys):
    for name in ("RECORDINGS", "RECORDED"):
        monkeypatch.setattr(files, name, tmp_path)
    assert predict_gpu_recordings.main([]) == 2
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("There is no recording in")


@pytest.mark.parametrize(
    "content",  # packed without the time, which would be in the name of the test
    [
        None,
        b"",
        b"no gzip",
        *(gzip.compress(text, mtime=0) for text in (b"[]", b"x")),
        gzip.compress(b"{}", mtime=0)[:-9],
    ],
)
def test_a_file_that_is_no_recording_is_named_by_the_benchmark(tmp_path, capsys, content):
    path = tmp_path / "file.json.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        predict_gpu_recordings.main([str(path)])
    assert ended.value.code == 2
    assert f"error: {path} " in capsys.readouterr().err.splitlines()[-1]


def test_the_benchmark_with_nothing_to_compare_says_so(synthetic, tmp_path, capsys):
    path = str(written(synthetic, tmp_path))
    known = synthetic["runs"][0]["id"]
    for runs, words, said in (
        (synthetic["runs"], ["--only", "zzz"], "--only zzz: none of the 4 recorded rows has that in its name"),
        (synthetic["runs"], ["--only", known, "zzz"], "--only zzz: none of the 4"),
        ([], [], "synthetic.json.gz: no run has a peak to compare"),
    ):
        written(synthetic | {"runs": runs}, tmp_path)
        with pytest.raises(SystemExit) as ended:
            predict_gpu_recordings.main([path, *words])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_recorder_goes_on_with_no_recording_of_another_machine(tmp_path):
    path = written({"format": 1, "header": HEADER, "runs": []}, tmp_path)
    assert record.Recording(path, HEADER, resume=True).rows == []
    with pytest.raises(SystemExit, match="recorded elsewhere .torch .* there and 2 here.: give another --out"):
        record.Recording(path, HEADER | {"torch": "2"}, resume=True)


def test_other_versions_are_said():
    assert compare.versions_differ(HEADER) == ""
    said = compare.versions_differ(HEADER | {"transformers": "5.0.0"})
    assert said.startswith("recorded with transformers 5.0.0 (here ")


# -- what a prediction adds to the trace -------------------------------------------------------------------------------


def test_each_thread_that_multiplies_has_a_workspace():
    """The workspaces take 2 x 32 MiB on a Hopper GPU. The trace of a tiny model itself takes less than 4 MiB."""
    hopper, ampere = (compare.predict(GPT2, HEADER | {"capability": capability}) for capability in ([9, 0], [8, 6]))
    difference = hopper.peak_allocated_bytes - ampere.peak_allocated_bytes
    assert difference == 2 * (33554432 - 8519680)
    assert 2 * 33554432 < hopper.peak_allocated_bytes < 2 * 33554432 + (4 << 20)


def test_what_was_there_before_counts_except_the_dropout_state_of_recurrent_nets():
    kept = compare.kept_by(GRU, (9, 0), 132, None)
    assert kept is not None
    with_before, without = (compare.predict(GPT2, HEADER, before) for before in (kept, None))
    assert with_before.peak_allocated_bytes - without.peak_allocated_bytes == kept.num_bytes
    assert compare.predict(GRU, HEADER, kept).peak_allocated_bytes == compare.predict(GRU, HEADER).peak_allocated_bytes


def test_what_a_row_has_before_it_follows_from_the_recurrent_runs_of_its_process(synthetic):
    """A recurrent run creates its own dropout state if a model was built, and so a seed set, since the last one."""
    kept = compare.kept_by(GRU, (9, 0), 132, None)
    held = {"before_allocated_bytes": kept.num_bytes, "before_reserved_bytes": kept.segment_bytes}
    first, again, gpt2 = row_of(GRU), row_of(GRU, "again") | held, row_of(GPT2) | held
    runs = [first, again, gpt2, row_of(GRU, "fresh")]
    found = [compare.kept_before({"header": HEADER, "runs": runs}, row) for row in runs]
    assert found == [None, kept, replace(kept, is_current=False), None]
    assert kept.is_current


def test_a_gradient_scaler_is_traced():
    trace, _ = compare.trace_of(replace(GRU, precision="fp16"), (9, 0))
    checks = [name for name in trace.ops.name if "_amp_foreach_non_finite" in trace.texts[name]]
    assert len(checks) == cases.NUM_STEPS


def test_every_mark_has_its_bytes():
    predicted = compare.predict(GPT2, HEADER)
    assert len(predicted.allocated_at) == 1 + 3 * cases.NUM_STEPS
    weights_bytes = sum(parameter.nbytes for parameter in cases.build(GPT2).parameters())
    at_model, forward, _, after_step, *_ = predicted.allocated_at
    assert weights_bytes <= at_model < weights_bytes * 1.5  # each tensor takes a multiple of 512 bytes
    assert forward > at_model
    # Gradients, AdamW's two moments and the workspaces remain.
    assert after_step - at_model - 2 * 33554432 >= 3 * weights_bytes * 0.99


# -- the matrix --------------------------------------------------------------------------------------------------------


def test_ids_are_unique_and_priorities_rise():
    runs = record.all_runs()
    assert len({run.id for run in runs}) == len(runs)
    priorities = [run.priority for run in runs]
    assert priorities == sorted(priorities)
    assert [run.case for run in runs if run.priority == 0] == list(cases.bases())
    assert 100 <= len(cases.all_cases()) <= 140
    assert {run.kind for run in runs} == {"shared", "limited", "fresh", "probe"}


def test_a_limited_run_comes_after_the_run_whose_peak_it_needs():
    runs = record.all_runs()
    position = {run.id: number for number, run in enumerate(runs)}
    limited = [run for run in runs if run.kind == "limited"]
    assert limited
    assert all(position[run.case.id] < position[run.id] for run in limited)


def test_a_case_survives_json():
    for planned in cases.all_cases():
        assert Case.from_dict(json.loads(json.dumps(planned.case.to_dict()))) == planned.case


def test_models_are_of_the_size_that_is_meant():
    """They take from hundreds of MiB to a few GiB, at 16 bytes per parameter for gradients and AdamW's moments."""
    with FakeTensorMode():
        for base in cases.bases():
            num_parameters = sum(parameter.numel() for parameter in cases.build(base).parameters())
            assert 10_000_000 < num_parameters < 150_000_000, base.id


def check_traces(model: str, most_cases: int | None) -> None:
    shrunk = dict.fromkeys(one.case.shrunk() for one in cases.all_cases() if one.case.model == model)
    for case in list(shrunk)[:most_cases]:
        trace, marks = compare.trace_of.__wrapped__(case, (9, 0))
        assert len(marks) == 1 + cases.NUM_STEPS * (2 * case.accumulation + 1), case.id
        assert set(trace.ops.step) == {1, 2, 3, 4, 5}, case.id


MODELS = [base.model for base in cases.bases()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", MODELS)
def test_the_first_cases_can_be_traced(model):
    check_traces(model, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_every_case_can_be_traced(model):
    check_traces(model, None)


def test_padding_is_padding_and_full_is_full():
    padded = cases.make_batch(Case("bert-mlm", 4, 16, padded=True, tiny=True), step=1)
    assert padded["attention_mask"].sum(1).tolist() == [16, 12, 8, 4]
    assert (padded["labels"][-1] == -100).tolist() == [False] * 4 + [True] * 12
    full = cases.make_batch(Case("bert-mlm", 4, 16, tiny=True), step=1)
    assert full["attention_mask"].all()
    assert full["input_ids"].min() >= 1
    assert full["input_ids"].max() < 101
    assert not torch.equal(full["input_ids"], cases.make_batch(Case("bert-mlm", 4, 16, tiny=True), step=2)["input_ids"])


@pytest.mark.parametrize("model", ["gpt2", "llama", "lstm-lm"])
def test_a_chunked_loss_is_the_loss(model):
    case = Case(model, 4, 200, tiny=True)  # 796 tokens: two chunks
    net = cases.build(case).eval()
    batch = cases.make_batch(case, step=1)
    losses = {loss: cases.compute_loss(replace(case, loss=loss), net, batch) for loss in ("model", "chunked")}
    if hasattr(torch.nn.functional, "linear_cross_entropy") and model != "lstm-lm":  # its head has a bias
        losses["linear-ce"] = cases.compute_loss(replace(case, loss="linear-ce"), net, batch)
    for loss in losses.values():
        torch.testing.assert_close(loss, losses["model"])


# -- recording ---------------------------------------------------------------------------------------------------------


def recorded(path: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.gpu.record", "--device", "cpu", "--tiny", "--out", str(path)]
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}  # the program must run without Plimsoll
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=True
    )


@pytest.mark.slow
def test_recording_goes_through_on_the_cpu(tmp_path):
    path = tmp_path / "cpu.json.gz"
    only = ["--only", "gru-cls-2x16-fp32-adamw-tiny", "gru-cls-8x16", "probe:"]
    done = recorded(path, "--minutes", "3", *only)
    recording = json.loads(gzip.decompress(path.read_bytes()))
    rows = {row["id"]: row for row in recording["runs"]}
    plain = rows["gru-cls-2x16-fp32-adamw-tiny"]
    assert plain["status"] == "ok", plain
    assert plain["peak_allocated_bytes"] is None
    assert [mark[:2] for mark in plain["marks"][:4]] == [
        [0, "model"],
        [1, "forward"],
        [1, "backward"],
        [1, "optimizer"],
    ]
    assert rows["gru-cls-2x16-fp32-adamw-tiny@fresh"]["status"] == "ok"
    assert rows["gru-cls-2x16-fp32-adamw-tiny@0.92"]["status"] == "left out"
    assert "gru-cls-8x16-fp32-adamw-accumulate4-tiny" in rows
    probes = {run_id: row["rows"] for run_id, row in rows.items() if row["kind"] == "probe"}
    assert len(probes) == 6
    assert not [row for probe in probes.values() for row in probe if "error" in row]
    assert f"{len(rows)}/{len(rows)} " in done.stdout

    again = recorded(path, "--minutes", "3", "--resume", *only)
    assert "torch" in again.stdout
    assert ": 0 runs" in again.stdout


@pytest.mark.long
def test_recording_stops_in_time_and_says_what_is_left(tmp_path):
    done = recorded(tmp_path / "none.json.gz", "--minutes", "0")
    assert "the time is over: " in done.stdout
    assert files.read_recording(tmp_path / "none.json.gz")["runs"] == []


def test_a_run_that_fails_is_recorded_and_the_next_goes_on(tmp_path, monkeypatch, capsys):
    def fail(case, *rest):
        if case.model == "gpt2":
            raise torch.OutOfMemoryError("CUDA out of memory") if case.accumulation == 1 else ValueError("no")

    monkeypatch.setattr(record, "train", fail)
    recording = record.Recording(tmp_path / "x.json.gz", {"device": "cpu", "torch": "2"}, resume=False)
    runs = [record.Run("shared", 0, case) for case in (GPT2, replace(GPT2, accumulation=2), GRU)]
    record.record(runs, record.Runner(meter.Meter("cpu")), recording, deadline=float("inf"))
    rows = files.read_recording(tmp_path / "x.json.gz")["runs"]
    assert [(row["status"], row["error"]) for row in rows] == [
        ("oom", "OutOfMemoryError: CUDA out of memory"),
        ("error", "ValueError: no"),
        ("ok", None),
    ]
    assert "3/3" in capsys.readouterr().out


def test_a_failed_device_goes_on_in_a_new_process(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(record, "train", lambda *_: (_ for _ in ()).throw(RuntimeError("illegal memory access")))
    monkeypatch.setattr(meter.Meter, "is_alive", lambda self: False)
    monkeypatch.setattr(os, "execv", lambda *command: said.append(command) or sys.exit(0))
    monkeypatch.setattr(sys, "argv", ["record.py", "--minutes", "9", "--only", "gru"])
    recording = record.Recording(tmp_path / "x.json.gz", {"device": "cpu", "torch": "2"}, resume=False)
    with pytest.raises(SystemExit):
        record.record([record.Run("shared", 0, GRU)], record.Runner(meter.Meter("cpu")), recording, float("inf"))
    assert said[0][1][1:4] == ["-m", "benchmarks.gpu.record", "--minutes"]
    assert "--resume" in said[0][1]
    assert len(files.read_recording(tmp_path / "x.json.gz")["runs"]) == 1  # the failed run is not repeated


class StubbedCuda:
    """A stub of torch.cuda in place of a GPU that we do not have: two numbers per name."""

    FUNCTIONS = [
        "set_device",
        "init",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction",
    ]

    def __init__(self, monkeypatch):
        self.calls = []
        for name in self.FUNCTIONS:
            monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: self.calls.append((name, *args)))
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600 << 20, 1000 << 20))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 << 20)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.peak": 7})
        properties = {"name": "Stub", "total_memory": 1000 << 20, "multi_processor_count": 4}
        kind = type("Properties", (), properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: kind)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **options: None)
        traces = [[{"action": "alloc", "addr": 1, "size": 512, "stream": 0}]]
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": traces})
        monkeypatch.setattr(meter, "_nvml_of_first_device", lambda: None)


def test_what_is_asked_of_cuda(tmp_path, monkeypatch):
    """The code for GPUs runs with a stub of torch.cuda, reads the right values, and removes the limit."""
    stub = StubbedCuda(monkeypatch)
    monkeypatch.setattr(record, "train", lambda case, model, device, note: note(0, "model"))
    gpu = meter.Meter("cuda:0")
    header = record.describe(gpu)
    assert (header["device"], header["capability"], header["total_bytes"]) == ("Stub", [9, 0], 1000 << 20)
    assert header["outside_at_start_bytes"] == 300 << 20
    recording = record.Recording(tmp_path / "x.json.gz", header, resume=False)
    recording.add({"id": GRU.id, "status": "ok", "peak_reserved_bytes": 200 << 20})
    runner = record.Runner(gpu)
    row = runner.do(record.Run("shared", 0, GRU, with_events=True), recording)
    assert (row["status"], row["peak_allocated_bytes"], row["outside_after_bytes"]) == ("ok", 7, 300 << 20)
    assert row["events"] == {"action": "a", "size_bytes": [512], "block": [0]}
    assert row["marks"] == [(0, "model", 0, 0, 7)]
    row = runner.do(record.Run("limited", 0, GRU, limit_share=0.5), recording)
    assert row["limit_bytes"] == 100 << 20
    shares = [call[1] for call in stub.calls if call[0] == "set_per_process_memory_fraction"]
    assert shares == [0.1, 1.0]


def test_events_become_columns():
    trace = [
        {"action": "segment_alloc", "addr": 4096, "size": 2097152, "stream": 0, "time_us": 1},
        {"action": "alloc", "addr": 4096, "size": 512, "stream": 0},
        {"action": "free_requested", "addr": 4096, "size": 512, "stream": 0},
        {"action": "free_completed", "addr": 4096, "size": 512, "stream": 0},
        {"action": "user_defined", "addr": 0, "size": 0, "stream": 0},
        {"action": "alloc", "addr": 8192, "size": 1024, "stream": 0},
        {"action": "oom", "device_free": 77, "size": 99, "stream": 0},
    ]
    assert meter.compact_events(trace) == {
        "action": "sarfao", "size_bytes": [2097152, 512, 512, 512, 1024, 99], "block": [0, 0, 0, 0, 1, 2],
    }  # fmt: skip
    trace[1]["stream"] = 140000
    assert meter.compact_events(trace)["stream"] == [0, 1, 0, 0, 0, 0]


def test_the_file_is_named_after_the_gpu_and_torch():
    header = {"device": "NVIDIA H200 (PCIe)", "torch": "2.11.0+cu130"}
    assert files.default_path(header).name == "nvidia-h200-pcie-torch2.11.0.json.gz"


def test_a_real_run_and_its_trace_do_the_same_ops():
    """Both use the same loop, so a run on the CPU has as many marks as its trace, and warnings do not differ."""
    marks = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases.train(GPT2, cases.build(GPT2), "cpu", lambda *mark: marks.append(mark))
    assert len(marks) == len(compare.trace_of(GPT2, (9, 0))[1])
