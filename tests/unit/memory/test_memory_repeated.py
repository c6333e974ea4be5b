"""A pass that stands for several has their time, and the memory of one."""

from __future__ import annotations

import torch

from plimsoll.memory.live import live_bytes
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.repeated import stands_for


def recorded(num_passes):
    with Recorder(phase=lambda: "forward") as recorder:
        recorder.step = 1
        given = torch.ones(8, 8)
        with stands_for(num_passes):
            kept = given @ given
        kept.add_(1)
    return recorder.trace("measured", "cpu")


def test_ops_are_noted_as_often_as_they_stand_for():
    once, often = recorded(1), recorded(5)
    products = [sum(trace.texts[name] == "aten.mm.default" for name in trace.ops.name) for trace in (once, often)]
    assert products == [1, 5]
    assert sum(often.ops.flops) == 5 * sum(once.ops.flops) == 5 * 2 * 8**3
    assert len(often.ops.name) == len(often.ops.phase) == len(often.ops.dtype) == len(once.ops.name) + 4
    assert live_bytes(often).peak_bytes == live_bytes(once).peak_bytes
    assert often.storages.num_bytes == once.storages.num_bytes


def test_without_a_recorder_it_does_nothing():
    with stands_for(3):
        assert torch.ones(2).sum() == 2
