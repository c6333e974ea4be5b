"""A trace in several heaps: each result equals a separate replay, and no heap is replayed without need."""

import numpy as np
import pytest
import torch
from torch import nn

import plain_heap
from plimsoll.memory import heaps
from plimsoll.memory.allocator.heap_calls import TENSOR_OBJECTS_BYTES
from plimsoll.memory.heaps import Heaps, steps_of
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.trace import DryRun, trace_training
from plimsoll.records.allocator import DEFAULT_HEAP, FAST_HEAP, KEPT_HEAP, TIGHT_HEAP
from plimsoll.records.trace import Trace

MIB = 1 << 20
FROM_32_MIB = FAST_HEAP.model_copy(update={"mmap_threshold_bytes": 32 * MIB, "trim_threshold_bytes": 64 * MIB})
TRIMMED = FROM_32_MIB.model_copy(update={"trims_after_steps": True})
BUILT_APART = FAST_HEAP.model_copy(update={"build_threshold_bytes": TIGHT_HEAP.mmap_threshold_bytes})
RULES = [DEFAULT_HEAP, FAST_HEAP, TIGHT_HEAP, KEPT_HEAP, FROM_32_MIB, TRIMMED, BUILT_APART]


def training(place: DryRun) -> None:
    """Run two steps and the passes of a third, with blocks from a few bytes to 6 MiB."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.LayerNorm(512), nn.Linear(512, 3000))
    optimizer = torch.optim.Adam(model.parameters())
    place.recorder.know_model(model)
    for number in range(3):
        model(torch.randn(400, 256)).logsumexp(1).mean().backward()
        if number < 2:
            optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def trace() -> Trace:
    found = trace_training(training, CpuLowering())
    assert len(found.nodes) > 10
    return found.model_copy(update={"unwritten": ((0, 4096),)})


@pytest.fixture
def listed(monkeypatch) -> list[tuple]:
    """Return the list of calls of `heap_calls`."""
    calls: list[tuple] = []
    real = heaps.heap_calls

    def spy(deltas, **asked):
        calls.append((list(deltas), asked))
        return real(*calls[-1][:1], **asked)

    monkeypatch.setattr(heaps, "heap_calls", spy)
    return calls


@pytest.fixture
def replayed(monkeypatch) -> list[tuple]:
    """Return the rules of the replayed heaps."""
    rules: list = []
    real = heaps.replay
    monkeypatch.setattr(heaps, "replay", lambda calls, one: (rules.append(one), real(calls, one))[1])
    return rules


@pytest.mark.parametrize("rules", RULES, ids=["default", "fast", "tight", "kept", "32 MiB", "trimmed", "built apart"])
def test_a_heap_does_what_the_plain_simulation_does(rules, trace, listed):
    found = Heaps().replay(trace, rules)
    ((deltas, asked),) = listed
    plain = plain_heap.replay(deltas, plain_heap.GlibcHeap(rules), **asked)
    assert found.resident.tolist() == plain.resident_bytes
    assert found.address.tolist() == plain.address_bytes
    assert asked["beside_bytes"] == TENSOR_OBJECTS_BYTES
    assert sum(asked["nodes_before"].values()) == 0 != len(asked["nodes_before"])
    assert bool(asked["trims_before"]) == rules.trims_after_steps
    assert bool(asked["thresholds_before"]) == (rules.build_threshold_bytes is not None)


def test_what_is_never_written_is_left_out(trace):
    found = Heaps().replay(trace, TIGHT_HEAP)
    assert found.written.storages.num_bytes[0] == trace.storages.num_bytes[0] - 4096
    assert found.live.total.tolist() == live_bytes(found.written).total.tolist()


def test_a_trace_is_listed_once_and_replayed_where_another_heap_would_do_otherwise(trace, listed, replayed):
    kept = Heaps()
    found = [kept.replay(trace, rules) for rules in RULES * 2]
    assert len(listed) == 3  # trims, and parts that are built separately, need other calls
    assert replayed == [one for one in RULES if one != FROM_32_MIB]  # no block is as large, so none is mapped
    for rules, one in zip(RULES * 2, found, strict=True):
        alone = Heaps().replay(trace, rules)
        assert np.array_equal(one.resident, alone.resident)
        assert np.array_equal(one.address, alone.address)


def test_another_trace_is_another(trace, replayed):
    kept = Heaps()
    again = trace.model_copy(update={"nodes": ()})
    peaks = [kept.replay(one, KEPT_HEAP).resident.max() for one in (trace, again, trace)]
    assert peaks[0] == peaks[2] != peaks[1]
    assert len(replayed) == 2


def test_later_steps_are_the_last_one_again_where_a_heap_keeps_large_blocks(trace, listed):
    kept = Heaps()
    short, long = (kept.replay(trace, KEPT_HEAP, is_long=is_long) for is_long in (False, True))
    (deltas, _), (more, asked) = listed
    steps = steps_of(trace, short.live)
    assert more[: len(deltas)] == deltas
    later = more[len(deltas) :]
    one = later[: len(later) // 8]
    assert later == one * 8 != []
    assert set(one) <= {deltas[row] for row in np.flatnonzero(steps == steps.max())}
    assert max(asked["nodes_before"]) > len(deltas)
    plain = plain_heap.replay(more, plain_heap.GlibcHeap(KEPT_HEAP), **asked)
    assert len(long.resident) == len(deltas)
    assert (long.resident >= short.resident).all()
    assert long.resident.max() == plain.peak_bytes
    tight = [kept.replay(trace, TIGHT_HEAP, is_long=is_long).resident.tolist() for is_long in (False, True)]
    assert tight[0] == tight[1]
