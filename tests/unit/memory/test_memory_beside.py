"""Copies that run beside the computation are noted with who waits for them, as often as they stand for."""

import torch

from plimsoll.memory.beside import copying_beside
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.repeated import stands_for


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
