"""Ops of a graph and asynchronous copies are annotated in a trace, and the simulated allocator treats them apart."""

import torch

from hand_traces import MIB, trace_of
from plimsoll.memory.annotations import (
    as_captured,
    captured_rows,
    copying_beside,
    is_captured,
    private_storages,
    stretches,
)
from plimsoll.memory.predict import count_on_cuda
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.repeated import stands_for
from plimsoll.records.device import DeviceSpec

CARD = DeviceSpec(
    name="card", architecture="8.0", capacity_bytes=1000 * MIB, capacity_high_bytes=1000 * MIB,
    capacity_source="by hand", context_low_bytes=0, context_high_bytes=0,
)  # fmt: skip


def test_rows_are_kept_as_stretches():
    assert stretches([]) == ()
    assert stretches([True, True]) == ((0, 2),)
    assert stretches([True, False, False, True]) == ((0, 1), (3, 4))


def test_a_recorder_notes_the_ops_of_the_block_and_their_storages():
    recorder = Recorder(phase=lambda: "forward")
    with recorder:
        recorder.step = 1
        x = torch.ones(8)
        with as_captured():
            assert is_captured()
            y = x * 2
        z = y + 1
    assert not is_captured()
    trace = recorder.trace("measured", "cpu")
    is_one = captured_rows(trace)
    names = [trace.texts[name] for name in trace.ops.name]
    assert [name for name, one in zip(names, is_one, strict=True) if one] == ["aten.mul.Tensor"]
    assert private_storages(trace) == {storage for storage, born in enumerate(trace.storages.born) if is_one[born]}
    assert len(private_storages(trace)) == 1
    del z


def two_steps(captured):
    """Return a trace of an eager step with 32 MiB of activations, and a captured one with an update of 24 MiB."""
    return trace_of(
        ("setup", 0, f"+w parameters {16 * MIB}"),
        ("forward", 1, f"+h activations {32 * MIB} -h"),
        ("forward", 2, f"+k activations {32 * MIB}"),
        ("backward", 2, "-k"),
        ("optimizer", 2, f"+t temporaries {24 * MIB} -t"),
    ).model_copy(update={"captured": captured})


def test_the_memory_of_a_graph_is_its_own_and_stays():
    """Without a graph the temporaries reuse the memory of activations; with one they cannot."""
    plain, graph = (count_on_cuda(two_steps(captured), CARD) for captured in ((), ((2, 4),)))
    assert plain.reserved.max() == (16 + 32) * MIB
    assert graph.reserved.max() == (16 + 32 + 24) * MIB  # and not 32 more: cached memory was freed before


def test_a_limit_counts_the_pool():
    assert count_on_cuda(two_steps(((2, 4),)), CARD, 71 * MIB).oom_row is not None
    assert count_on_cuda(two_steps(((2, 4),)), CARD, 72 * MIB).oom_row is None
    assert count_on_cuda(two_steps(()), CARD, 60 * MIB).oom_row is None


def test_the_capture_has_a_workspace_of_cublas_in_its_pool():
    texts = {"aten.op1.default": "aten.mm.default", "aten.op2.default": "aten.mm.default"}

    def reserved(captured):
        trace = two_steps(captured)
        named = trace.model_copy(update={"texts": tuple(texts.get(text, text) for text in trace.texts)})
        return int(count_on_cuda(named, card).reserved.max())

    card = CARD.model_copy(update={"cublas_workspace_bytes": 32 * MIB})
    assert reserved(()) == (16 + 32 + 32) * MIB
    assert reserved(((2, 4),)) == (16 + 32 + 32 + 32 + 24) * MIB


def copied(to_device=True):
    with copying_beside(to_device) as found:
        torch.zeros(3).copy_(torch.ones(3))
    return found


def recorded(work):
    recorder = Recorder(phase=lambda: "forward")
    with recorder:
        work()
    return recorder.trace("measured", "cpu")


def test_without_a_recorder_nothing_is_noted():
    copied().note_wait(by_processor=True)


def test_each_op_of_a_copy_is_noted_and_what_comes_next_waits_for_the_last():
    def work():
        found = copied()
        torch.ones(3)
        found.note_wait(by_processor=False)
        torch.ones(3)
        copied(to_device=False).note_wait(by_processor=True)

    trace = recorded(work)
    names = [trace.texts[name] for name in trace.ops.name]
    last = len(names)
    row = next(row for row, _ in trace.copies if names[row] == "aten.copy_.default")
    assert dict(trace.copies)[row] is True
    assert dict(trace.copies)[last - 1] is False
    assert trace.waits == ((row + 2, row, False), (last, last - 1, True))


def test_what_stands_for_several_passes_is_noted_for_each():
    def once():
        copied().note_wait(by_processor=False)

    def work():
        torch.ones(3)
        with stands_for(3):
            once()

    def thrice():
        torch.ones(3)
        for _ in range(3):
            once()

    assert recorded(work).copies == recorded(thrice).copies
    assert recorded(work).waits == recorded(thrice).waits
