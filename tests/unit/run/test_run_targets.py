"""Where a training is to run: devices by name, limits, and what a process takes without a model."""

import os
import signal

import pytest
import torch

from hand_traces import trace_of
from plimsoll.device.gpus import find_gpu
from plimsoll.errors import BudgetError, DeviceError, InputError
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice
from plimsoll.records.prediction import Estimate
from plimsoll.run.targets import StartedBaseline, find_target, gpu_target, job_baseline, own_baseline

GIB = 1 << 30
MIB = 1 << 20


def nothing():
    return Estimate(likely_bytes=0, low_bytes=0, high_bytes=0)


def test_a_gpu_by_name_has_all_of_its_memory_or_the_budget():
    target = find_target("RTX 3060", None, nothing)
    assert (target.limit_bytes, target.limit_source) == (find_gpu("rtx3060").capacity_bytes, "all that the card has")
    assert target.lowering().name == "cuda 8.6"
    target = find_target("rtx3060", 8 * GIB, nothing)
    assert (target.limit_bytes, target.limit_source) == (8 * GIB, "the budget")


def test_a_budget_beyond_the_card_is_refused():
    with pytest.raises(
        BudgetError, match="a budget of 24.0 GiB is more than RTX 3060 has, 11.8 GiB: give that or less"
    ):
        gpu_target(find_gpu("rtx3060"), 24 * GIB)


def test_an_unknown_gpu_is_refused_with_the_list():
    with pytest.raises(DeviceError, match=r"there is no GPU 'rtx3061' in the table: did you mean .*RTX 3060.*H200"):
        find_target("rtx3061", None, nothing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_local_is_the_processor_where_there_is_no_gpu():
    target = find_target("local", None, nothing)
    assert target.lowering().name == "cpu"
    with pytest.raises(DeviceError):
        find_target("cuda", None, nothing)


def test_a_process_answers_several_plans():
    with StartedBaseline(Job.from_fields({"model": "lstm", "data": "nowhere.txt"})) as started:
        assert started.wait() == started.wait()


def test_a_training_process_is_started_to_read_its_baseline():
    job = Job.from_fields({"model": "lstm", "data": "nowhere.txt"})
    estimate = job_baseline(job)
    assert estimate.measured_bytes == estimate.likely_bytes
    assert estimate.low_bytes < estimate.likely_bytes < estimate.high_bytes
    assert 50 * MIB < estimate.likely_bytes < 1 * GIB


def test_a_model_that_cannot_be_is_the_job_s_fault_and_not_the_process_s():
    job = Job.from_fields({"model": {"architecture": "gpt2", "n_layers": 2}, "data": "nowhere.txt"})
    with pytest.raises(InputError, match=r"^model: `gpt2` has no field `n_layers`; did you mean `n_layer`\?$"):
        job_baseline(job)


@pytest.mark.slow
def test_the_baseline_has_what_a_function_of_the_users_imports(tmp_path, monkeypatch):
    """Inside itself, where looking for the function does not import it."""
    (tmp_path / "large_library.py").write_text("DATA = bytearray(100 << 20)\n")
    function = "import torch\n\n\ndef model(vocab_size):\n{}    return torch.nn.Linear(1, 1)\n"
    (tmp_path / "own_model.py").write_text(function.format("    import large_library\n"))
    (tmp_path / "small_model.py").write_text(function.format(""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    fields = {"data": {"train": "text.txt"}, "sequence_length": 8, "batch_size": 2}
    large, small = (
        job_baseline(Job.from_fields(fields | {"model": f"{name}:model"})) for name in ("own_model", "small_model")
    )
    assert large.likely_bytes - small.likely_bytes == pytest.approx(100 * MIB, abs=8 * MIB)


def test_what_reads_a_baseline_ends_where_nobody_waits_for_it():
    with StartedBaseline(Job.from_fields({"model": "lstm", "data": "nowhere.txt"})) as started:
        assert started._child.poll() is None
    assert started._child.returncode == -signal.SIGKILL


def test_what_a_trace_counts_again_is_not_of_the_baseline():
    assert own_baseline(100 * MIB).likely_bytes == pytest.approx(own_baseline(0).likely_bytes - 100 * MIB, abs=8 * MIB)


@pytest.mark.parametrize(("budget_bytes", "held_mib"), [(None, 0), (400 << 20, 3)])
def test_a_plan_says_how_the_heap_is_counted(budget_bytes, held_mib):
    mib = 1 << 20
    trace = trace_of(("forward", 1, f"+a activations {3 * mib} +b gradients 1000 -a +c activations {8 * mib}"))
    target = find_target("cpu", budget_bytes, lambda: Estimate(likely_bytes=0, low_bytes=0, high_bytes=0))
    tightened = (Choice(technique="heap", options={"mapped_from": "128KiB"}),)
    usual, tight = (target.count(trace, choices).peak.likely_bytes for choices in ((), tightened))
    assert round((usual - tight) / mib) == held_mib  # 3 MiB are below glibc's threshold inside a budget only


def test_a_budget_below_what_is_kept_back_leaves_nothing():
    target = find_target("cpu", 1 << 20, nothing)
    assert (target.limit_bytes, target.kept_back_bytes) == (0, 16 << 20)
    target = find_target("cpu", 100 << 20, nothing)
    assert (target.limit_bytes, target.kept_back_bytes) == (84 << 20, 16 << 20)
