"""The heap of a process: the settings, their restoration, and the predicted memory."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from hand_traces import trace_of
from plimsoll.device.cpu import heap
from plimsoll.memory.predict import count_on_cpu
from plimsoll.models.hooks import StepHooks
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.allocator import FAST_HEAP, KEPT_HEAP, TIGHT_HEAP
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import Setting, conflict_among, installed
from plimsoll.techniques.heap import Heap
from plimsoll.techniques.mechanisms.allocators import heap_rules

pytestmark = pytest.mark.cold  # a heap as a process begins with

CPU = Setting(device="cpu", batch_size=4)
NOTHING = Estimate(likely_bytes=0, low_bytes=0, high_bytes=0)


def choice(**options):
    return Choice(technique="heap", options=options)


def workload():
    model = nn.Linear(2, 2)
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, "samples")


def test_there_are_choices_for_the_processor_only():
    assert [str(one) for one in Heap().choices(workload(), CPU)] == [
        "heap=never",
        "heap=32MiB",
        "heap=128KiB",
    ]
    assert "`cache` empties" in Heap().choices(workload(), Setting(device="cuda", batch_size=4))


@pytest.mark.parametrize(
    ("asked", "device", "reason"),
    [
        (choice(), "cpu", None),
        (choice(mapped_from="1MiB"), "cpu", None),
        (choice(mapped_from="3MiB"), "cpu", "mapped_from is 3MiB: give one of never, 32MiB, 4MiB, 1MiB, 128KiB"),
        (choice(mapped_from="never"), "cpu", None),
        (
            choice(mapped_from="never", trim=True),
            "cpu",
            "mapped_from=never keeps the memory that trim=true returns: leave one of them out",
        ),
        (choice(), "cuda", "it is for the heap of a CPU, and this training is on cuda"),
    ],
)
def test_a_threshold_that_was_not_measured_is_refused(asked, device, reason):
    assert Heap().conflicts(asked, (), workload(), Setting(device=device, batch_size=4)) == reason


def test_the_predictor_counts_with_what_is_set():
    assert heap_rules([micro_batch_choice(4)]) is None
    assert heap_rules([choice(mapped_from="128KiB", trim=False)]) == TIGHT_HEAP
    assert heap_rules([choice()]) == FAST_HEAP
    assert heap_rules([choice(mapped_from="never")]) == KEPT_HEAP
    large = {"mmap_threshold_bytes": 32 << 20, "trim_threshold_bytes": 64 << 20}
    assert heap_rules([choice(mapped_from="32MiB")]) == FAST_HEAP.model_copy(update=large)
    assert heap_rules([choice(trim=True)]) == FAST_HEAP.model_copy(update={"trims_after_steps": True})


def test_parameters_in_a_file_have_the_tightest_heap_and_leave_no_choice():
    offload = Choice(technique="parameter_offload", options={"gradients": False})
    assert heap_rules((micro_batch_choice(1), offload)) == TIGHT_HEAP
    reason = conflict_among((offload, choice()), workload(), CPU)
    assert reason is not None
    assert "parameter_offload sets the heap up itself" in reason


def test_free_pages_go_back_after_each_step_that_happened():
    made = workload()
    calls = []
    step = TrainStep(made.model, made.optimizer, lambda model, batch: model(batch).sum(), units="samples")
    step.workload.hooks = StepHooks(after_step=(lambda: calls.append(step.num_steps),))
    with installed(step.workload, [choice(trim=True)]):
        assert step.workload.hooks.after_step[1] is heap.trim
        step(torch.ones(4, 2))
        step(torch.ones(4, 2))
    assert calls == [1, 2]
    assert len(step.workload.hooks.after_step) == 1
    with installed(step.workload, [choice(mapped_from="1MiB")]):
        assert len(step.workload.hooks.after_step) == 1


_PROGRAM = """
import torch
from plimsoll.device.cpu import heap
from plimsoll.device.base import backend_for
from plimsoll.records.plan import Choice
from plimsoll.techniques import installed
from plimsoll.models.hooks import StepHooks

kept = []

def num_mapped():
    heap.free_bytes()
    return heap._C_LIBRARY.mallinfo2().others[3]  # hblks

def is_mapped(num_bytes):  # of 20 blocks, for a few may find a hole
    before = num_mapped()
    kept.extend(torch.empty(num_bytes, dtype=torch.uint8) for _ in range(20))
    return int(num_mapped() - before >= 10)

def sizes():
    return [is_mapped(size) for size in (256 << 10, 2 << 20, 6 << 20, 40 << 20)]

class Nothing:
    hooks = StepHooks()

with backend_for("cpu").limited(8 << 30):
    found = [sizes()]
    for word in ("4MiB", "1MiB", "128KiB", "never", "32MiB"):
        with installed(Nothing(), [Choice(technique="heap", options={"mapped_from": word})]):
            found.append(sizes())
    found.append(sizes())
with installed(Nothing(), [Choice(technique="heap", options={"mapped_from": "128KiB"})]):
    found.append(sizes())
found.append(sizes())
print(found)
"""


def test_blocks_are_mapped_from_there_on_and_afterwards_as_before():
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    usual, never, large = [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]
    inside = [usual, usual, [0, 1, 1, 1], [1, 1, 1, 1], never, large, usual]
    assert eval(done.stdout) == [*inside, [1, 1, 1, 1], large]


def test_a_trim_between_steps_is_in_the_prediction():
    """Step 1 leaves a hole of 3 MiB below a live block. Step 2 maps its block, so the hole only counts untrimmed."""
    mib = 1 << 20
    trace = trace_of(
        ("forward", 1, f"+a activations {3 * mib} +b gradients {mib} -a"),
        ("forward", 2, f"+c activations {8 * mib} -c"),
    )
    peaks = [count_on_cpu(trace, NOTHING, heap_rules([choice(trim=trim)])).peak.likely_bytes for trim in (False, True)]
    assert (peaks[0] - peaks[1]) // mib == 2  # whole pages of the 3 MiB
    assert 12 * mib <= peaks[0] < 13 * mib


def test_the_largest_block_that_leaves_a_hole_is_counted():
    """Blocks from before the first step, blocks that stay, and separate mappings do not count."""
    mib = 1 << 20
    trace = trace_of(
        ("setup", 0, f"+a parameters {9 * mib} -a"),
        ("forward", 1, f"+b activations {3 * mib} +c activations {6 * mib} +d gradients {7 * mib} -b -c"),
    )
    words = ("never", "32MiB", "4MiB", "1MiB")
    found = [count_on_cpu(trace, NOTHING, heap_rules([choice(mapped_from=word)])) for word in words]
    assert [counted.holes_bytes for counted in found] == [(18 * mib, 30 * mib)] * 2 + [(0, 0)] * 2
    without = replace(found[0], holes_bytes=(0, 0))
    assert found[0].peak.high_bytes == without.peak.high_bytes + 30 * mib
    assert found[0].peak.low_bytes == without.live.peak_bytes  # which is more than 18 MiB less


_TIGHTENED = """
from plimsoll.device.base import backend_for
from plimsoll.device.cpu import data_limit, heap
from plimsoll.models.hooks import StepHooks
from plimsoll.records.plan import Choice
from plimsoll.techniques import installed

class Nothing:
    hooks = StepHooks()

asked = []
really = heap.map_blocks_from
heap.map_blocks_from = lambda num_bytes: (asked.append(num_bytes), really(num_bytes))
backend = backend_for("cpu")
with backend.limited(4 << 30):
    with installed(Nothing(), [Choice(technique="heap", options={"mapped_from": "never"})]):
        backend.release(last_resort=True)
    with installed(Nothing(), [Choice(technique="heap", options={"mapped_from": "never"})]):
        pass
backend.release(last_resort=True)  # without a limit there is none to keep
print(asked == [heap.FAST_BYTES, *[heap.TIGHT_BYTES] * 4, heap.USUAL_BYTES], asked)
"""


def test_what_the_last_resort_has_set_stays_until_the_limit_ends():
    done = subprocess.run([sys.executable, "-c", _TIGHTENED], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True"), done.stdout
