"""Autograd's graph: sizes by hand, and how many nodes each op creates and frees."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plimsoll.memory.autograd_graph import MOST_NODES, graph_size, has_graph, storage_bytes, storage_key
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.trace import DryRun, trace_training
from plimsoll.records.trace import Trace


@pytest.fixture
def leaf():
    return torch.ones(256, requires_grad=True)  # 1 KiB


def test_a_graph_is_its_operations_and_what_they_save(leaf):
    """tanh and exp save their results of 1 KiB each; with the node of the leaf, there are three nodes."""
    result = torch.exp(torch.tanh(leaf))
    assert graph_size([result]) == (3, 2048)
    assert graph_size([result], without=[result]) == (3, 1024)
    assert graph_size([result, result]) == (3, 2048)


def test_after_backward_the_operations_stay_and_save_nothing(leaf):
    result = torch.exp(torch.tanh(leaf))
    result.sum().backward()
    assert graph_size([result]) == (3, 0)


def test_parameters_are_left_out():
    layer, batch = nn.Linear(8, 8), torch.ones(4, 8)
    size = graph_size([layer(batch)], without=layer.parameters())
    assert size.saved_bytes == 4 * 8 * 4  # the input


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.own = torch.ones(512)
        ctx.save_for_backward(x * 2)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_function_of_the_users_keeps_its_attributes_also_after_backward(leaf):
    result = Keeping.apply(leaf)
    assert graph_size([result]) == (2, 2048 + 1024)
    result.sum().backward()
    assert graph_size([result]) == (2, 2048)


def test_what_hooks_have_saved_elsewhere_does_not_count_and_is_not_fetched(leaf):
    def fetch(packed):
        raise AssertionError

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "on the disk", fetch):
        result = torch.tanh(leaf)
    assert graph_size([result]) == (2, 0)


def test_lists_that_an_operation_saves_count(leaf):
    result = leaf[torch.tensor([0, 1, 2, 3])]
    assert graph_size([result]) == (2, 4 * 8)  # the indices


def test_where_torch_does_not_show_what_is_saved_it_is_unknown(leaf, monkeypatch):
    monkeypatch.setattr("plimsoll.memory.autograd_graph._raw_saved", lambda node: [object()])
    assert graph_size([torch.tanh(leaf)]) == (2, None)


def test_a_graph_that_is_too_large_is_not_walked_to_its_end(leaf):
    state = leaf
    for _ in range(MOST_NODES + 1):
        state = state * 2.0
    assert graph_size([state]) is None


def test_who_has_a_graph(leaf):
    assert [has_graph(tensor) for tensor in (leaf, leaf * 2, (leaf * 2).detach(), torch.ones(1))] == [
        False, True, False, False,
    ]  # fmt: skip


def test_a_storage_counts_once_and_a_sparse_tensor_has_none():
    whole = torch.ones(256)
    sparse = torch.eye(3).to_sparse()
    assert storage_key(whole) == storage_key(whole[1:])
    assert storage_key(sparse) is None
    assert storage_bytes([whole, whole[1:], sparse, torch.ones(1)]) == 1028
    assert storage_bytes([whole[1:]], without=[whole]) == 0


def traced(train) -> Trace:
    return trace_training(train, CpuLowering())


def phases_of(trace: Trace) -> list[tuple[str, str, int]]:
    """Return the number of nodes by the phases in which they were created and freed."""
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
    """Two linear layers have 4 nodes (transposition and product); tanh and sum have 2. The next op frees them."""
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
