"""Targets of a training: devices by name, limits, and the memory of a process without a model."""

import time
from dataclasses import replace

import pytest
import torch

from hand_traces import trace_of
from plimsoll.device.cuda.gpus import find_gpu
from plimsoll.errors import BudgetError, DeviceError
from plimsoll.planning.targets import (
    find_target,
    gpu_target,
    own_baseline,
    require_budget,
)
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice
from plimsoll.records.prediction import Estimate

GIB = 1 << 30
MIB = 1 << 20


def nothing():
    return Estimate(likely_bytes=0, low_bytes=0, high_bytes=0)


def test_a_gpu_by_name_has_all_of_its_memory_or_the_budget():
    target = find_target("RTX 3060", None, nothing)
    assert (target.limit_bytes, target.limit_source) == (find_gpu("rtx3060").capacity_bytes, "the whole card")
    assert target.lowering().name == "cuda 8.6"
    target = find_target("rtx3060", 8 * GIB, nothing)
    assert (target.limit_bytes, target.limit_source) == (8 * GIB, "the budget")


@pytest.mark.parametrize("name", ["a100-40gb", "h200", "rtx3060", "t4"])
def test_a_gpu_is_found_wherever_its_name_is_in_the_alphabet(name):
    assert find_target(name, None, nothing).spec == find_gpu(name)


def test_a_gpu_of_which_no_architecture_is_known_is_taken_for_an_a100():
    unknown = find_gpu("rtx3060").model_copy(update={"architecture": None})
    assert gpu_target(unknown, None).lowering().name == "cuda 8.0"


def test_all_that_there_is_may_be_the_budget():
    spec = find_gpu("rtx3060")
    assert gpu_target(spec, spec.capacity_high_bytes).limit_bytes == spec.capacity_high_bytes
    with pytest.raises(BudgetError):
        gpu_target(spec, spec.capacity_high_bytes + 1)
    capacity_bytes = find_target("cpu", None, nothing).capacity_bytes
    assert find_target("cpu", capacity_bytes, nothing).limit_bytes == capacity_bytes - 16 * MIB
    with pytest.raises(BudgetError):
        find_target("cpu", capacity_bytes + 1, nothing)


def test_without_a_budget_the_whole_machine_is_the_limit():
    target = find_target("cpu", None, nothing)
    assert (target.limit_bytes, target.kept_back_bytes, target.has_budget) == (target.capacity_bytes, 0, False)
    assert target.limit_source == "memory available to this process"


@pytest.mark.parametrize("budget", [{}, {"device": "1GiB"}])
def test_a_job_whose_budget_is_here_is_let_through(budget):
    require_budget(Job.from_fields({"model": "lstm", "data": "nowhere.txt", "device": "cpu", "budget": budget}))


def test_a_job_whose_budget_is_more_than_there_is_here_is_refused():
    fields = {"model": "lstm", "data": "nowhere.txt", "device": "cpu", "budget": {"device": "1PiB"}}
    with pytest.raises(BudgetError, match=r"a budget of 1\.0 PiB is more than"):
        require_budget(Job.from_fields(fields))


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
    for name in ("cuda", "CUDA:0"):
        with pytest.raises(DeviceError) as caught:
            find_target(name, None, nothing)
        assert "in the table" not in str(caught.value)  # the device is requested, not a card by name


def test_a_process_is_not_known_to_the_byte():
    estimate = own_baseline(0)
    assert estimate.low_bytes == pytest.approx(0.97 * estimate.likely_bytes, abs=1)
    assert estimate.high_bytes == pytest.approx(1.03 * estimate.likely_bytes, abs=1)
    assert own_baseline(1 << 50).likely_bytes == 0


HELD = trace_of(("forward", 1, f"+a activations {40 * MIB} +b@host inputs {3 * MIB} -b@host"))


def on_cpu(limit_bytes=None):
    """Return a target whose process takes no memory."""
    target = find_target("cpu", None, nothing)
    return target if limit_bytes is None else replace(target, limit_bytes=limit_bytes)


def test_what_needs_all_of_the_limit_fits_and_a_byte_more_does_not():
    counted = on_cpu().count(HELD)
    assert on_cpu(counted.peak.likely_bytes).fits(counted)
    assert not on_cpu(counted.peak.likely_bytes - 1).fits(counted)


def test_beside_a_gpu_the_host_has_the_process_and_what_the_trace_holds_there():
    target = gpu_target(find_gpu("rtx3060"), None)
    host = target.predict(target.count(HELD), "by hand", "fp32").host
    assert (host.low_bytes, host.likely_bytes, host.high_bytes) == (423 * MIB, 2391 * MIB // 2, 1968 * MIB)
    assert (host.traced_bytes, host.assumed_bytes) == (3 * MIB, 2385 * MIB // 2)
    assert on_cpu().predict(on_cpu().count(HELD), "by hand", "fp32").host is None


@pytest.mark.parametrize(("percent", "is_said"), [(0, False), (0.9, False), (1.1, True), (30, True)])
def test_memory_that_is_never_used_is_printed_from_a_hundredth_of_the_peak_on(percent, is_said):
    counted = on_cpu().count(HELD)
    unwritten_bytes = int(percent * counted.peak.likely_bytes / 100)
    counted = replace(counted, unwritten_bytes=unwritten_bytes)
    assumptions = on_cpu().predict(counted, "by hand", "fp32").assumptions
    assert [one.high_bytes for one in assumptions] == ([unwritten_bytes] if is_said else [])


@pytest.mark.parametrize(("device", "kept_mib"), [("cpu", 6), ("rtx3060", 256)])
def test_what_ranks_exchange_takes_memory_of_a_library(device, kept_mib):
    target = find_target(device, None, nothing)
    one_of_two = HELD.model_copy(update={"texts": (*HELD.texts, "c10d.allreduce_.default")})
    kept_bytes = target.count(one_of_two).peak.likely_bytes - target.count(HELD).peak.likely_bytes
    assert kept_bytes == kept_mib * MIB


def test_how_long_a_prediction_took_counts_from_when_its_target_was_known():
    began_seconds = time.perf_counter()
    target = on_cpu()
    took_seconds = target.predict(target.count(HELD), "by hand", "fp32").predict_seconds
    assert 0 <= took_seconds <= time.perf_counter() - began_seconds


def test_what_a_trace_counts_again_is_not_of_the_baseline():
    assert own_baseline(100 * MIB).likely_bytes == pytest.approx(own_baseline(0).likely_bytes - 100 * MIB, abs=8 * MIB)


@pytest.mark.parametrize(("budget_bytes", "held_mib"), [(None, 0), (400 << 20, 3)])
def test_a_plan_says_how_the_heap_is_counted(budget_bytes, held_mib):
    mib = 1 << 20
    trace = trace_of(("forward", 1, f"+a activations {3 * mib} +b gradients 1000 -a +c activations {8 * mib}"))
    target = find_target("cpu", budget_bytes, lambda: Estimate(likely_bytes=0, low_bytes=0, high_bytes=0))
    tightened = (Choice(technique="heap", options={"mapped_from": "128KiB"}),)
    usual, tight = (target.count(trace, choices).peak.likely_bytes for choices in ((), tightened))
    assert round((usual - tight) / mib) == held_mib  # 3 MiB are below glibc's threshold only inside a budget


def test_a_budget_below_what_is_kept_back_leaves_nothing():
    target = find_target("cpu", 1 << 20, nothing)
    assert (target.limit_bytes, target.kept_back_bytes) == (0, 16 << 20)
    target = find_target("cpu", 100 << 20, nothing)
    assert (target.limit_bytes, target.kept_back_bytes) == (84 << 20, 16 << 20)
