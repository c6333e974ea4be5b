"""The nodes of autograd's graph, told op by op: how many are made, and when they are gone."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.trace import DryRun, trace_training
from plimsoll.records.trace import Trace


def traced(train) -> Trace:
    return trace_training(train, CpuLowering())


def phases_of(trace: Trace) -> list[tuple[str, str, int]]:
    """In which phase nodes were made, in which they were gone, and how many."""
    phases = trace.ops.phase
    found: dict[tuple[str, str], int] = {}
    for made, gone, number in trace.nodes:
        key = phases[made], phases[gone] if gone >= 0 else "never"
        found[key] = found.get(key, 0) + number
    return [(*key, number) for key, number in found.items()]


def training(model: nn.Module, shape: tuple[int, ...], num_steps: int = 1):
    def train(place: DryRun) -> None:
        fake = place.fake_model(model)
        optimizer = torch.optim.SGD(fake.parameters(), lr=0.1)
        for _ in range(num_steps):
            result = fake(place.fake_batch(torch.ones(shape)))
            (result[0] if isinstance(result, tuple) else result).sum().backward()
            optimizer.step()

    return train


def test_a_chain_of_ops_makes_a_node_each_which_are_gone_after_backward():
    """Two linear layers transpose their weights and multiply: 4 nodes; tanh and sum: 2. Gone at the next op."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    trace = traced(training(model, (2, 3)))
    assert sum(number for *_, number in trace.nodes) == 6
    assert phases_of(trace) == [("forward", "copy", 5), ("loss", "copy", 1)]


def test_an_unrolled_net_makes_some_ten_for_every_step():
    short, long = (sum(n for *_, n in traced(training(nn.GRU(2, 2), (steps, 1, 2))).nodes) for steps in (10, 110))
    assert (long - short) / 100 == 16
    both, short = (
        sum(n for *_, n in traced(training(nn.LSTM(2, 2), (steps, 1, 2))).nodes) for steps in (110, 10)
    )  # oneDNN's is one op
    assert both == short


def test_without_gradients_there_are_none():
    def evaluate(place: DryRun) -> None:
        with torch.no_grad():
            place.fake_model(nn.GRU(2, 2))(torch.ones(5, 1, 2))

    assert traced(evaluate).nodes == ()


def test_those_of_a_recomputation_are_gone_when_gradients_are_computed_again():
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

        def forward(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            return hidden

    trace = traced(training(Blocks(), (2, 3)))
    made_again = [(made, gone) for made, gone, _ in trace.nodes if trace.ops.phase[made] == "backward"]
    assert made_again
    assert {trace.ops.phase[gone] for _, gone in made_again} == {"backward"}
    first, second = sorted({gone for _, gone in made_again})
    assert all(made >= first for made, gone in made_again if gone == second)  # one block at a time


def test_every_step_has_its_own():
    trace = traced(training(nn.Linear(3, 3), (2, 3), num_steps=3))
    steps = trace.ops.step
    assert [(steps[made], steps[gone]) for made, gone, _ in trace.nodes if steps[made] != steps[gone]] == []
    assert sorted({steps[made] for made, *_ in trace.nodes}) == [1, 2, 3]
