"""A pass that stands for several passes has the time of all of them, and the memory of one."""

from __future__ import annotations

import torch

from plimsoll.memory.known_values import known_of
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.repeated import Stretch, place_of, row_of, stands_for
from plimsoll.memory.trace import dry_run

SIDE = 128  # more values than a dry run computes with


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


def trained(work, num_times, is_noted_again):
    """Return the trace of `num_times` times the same work on one weight, which runs each time or once."""
    with dry_run(CpuLowering(), lambda: "forward", keeps_all=True) as stage:
        stage.recorder.step = 1
        weight = torch.ones(SIDE, SIDE, requires_grad=True)
        stage.recorder.know([("weight", weight)], "parameters")
        begin = place_of(stage.recorder)
        made = work(weight)
        stretch = Stretch(stage.recorder, begin, made)
        for _ in range(num_times - 1):
            made = None  # the tensors of the previous time are freed first
            made = stretch.again() if is_noted_again else work(weight)
        sum(one.sum() for one in made).item()
        del made
        return stage.trace(), stretch.is_closed


def forward_and_backward(weight):
    hidden = torch.tanh(weight @ weight)
    (gradient,) = torch.autograd.grad((hidden @ weight).sum(), weight)
    return [gradient]


def test_a_stretch_that_is_noted_again_is_as_if_it_had_run():
    """Ops, events, storages and autograd nodes are equal, and later ops can use its tensors."""
    run, is_closed = trained(forward_and_backward, 3, is_noted_again=False)
    noted, _ = trained(forward_and_backward, 3, is_noted_again=True)
    assert is_closed
    assert noted == run
    assert live_bytes(noted).peak_bytes >= 4 * SIDE**2 * 4


def test_a_stretch_that_leaves_or_ends_something_else_is_not_closed():
    kept = []

    def leaves(weight):
        kept.append(weight.detach() + 1)
        return [weight.detach() + 2]

    def ends(weight):
        weight.data = weight.detach() + 1
        return [weight.detach() + 2]

    def gives_a_view(weight):
        return [(weight.detach() + 2)[1:]]

    def has_a_graph(weight):
        return [weight + 2]

    for work in (leaves, ends, gives_a_view, has_a_graph):
        assert not trained(work, 1, is_noted_again=False)[1], work


def test_older_storages_that_end_have_others_in_their_place():
    """Notes about a tensor, such as its value, pass to the tensor in its place."""

    def consumed(is_noted_again):
        with dry_run(CpuLowering(), lambda: "forward", keeps_all=True) as stage:
            stage.recorder.step = 1
            given = [torch.zeros(SIDE, SIDE) for _ in range(3)]
            counts, stretch = [], None
            while given:
                row = row_of(stage.recorder, given[-1])
                if stretch is not None and is_noted_again:
                    counts += stretch.again([row])
                    given.pop()
                    continue
                begin = place_of(stage.recorder)
                given.pop().add_(1)
                counts.append(torch.tensor(3.0))
                stretch = Stretch(stage.recorder, begin, counts[-1:], [row])
                assert stretch.is_closed
            counts[0].add_(1)
            assert [known_of(one).item() for one in counts] == [4, 3, 3]
            return stage.trace()

    assert consumed(is_noted_again=True) == consumed(is_noted_again=False)
