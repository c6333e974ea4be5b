"""The CPU as a target: the ops of a trace are the ops that a real run dispatches."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.trace import trace_training
from workloads import Cnn, bert, gpt2

IDS = torch.arange(16).view(2, 8)
# These ops differ for real tensors, fake tensors, and no tensors; they allocate nothing that stays alive.
LOOKS = {"detach", "_local_scalar_dense", "item", "lift_fresh", "alias", "is_same_size", "scalar_tensor"}


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    for _ in range(2):
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def without_looks(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("aten.") and name.split(".")[1] not in LOOKS]


@pytest.mark.parametrize(
    ("build", "labels"), [(gpt2, IDS), (bert, IDS[:, 0] % 3), (Cnn, IDS[:, 0] % 3)], ids=["gpt2", "bert", "cnn"]
)
def test_the_ops_are_those_of_a_real_run(build, labels: torch.Tensor):
    torch.manual_seed(0)
    model, batch = build().train(), {"input_ids": IDS, "labels": labels}
    optimizer = torch.optim.AdamW(model.parameters())
    trace = trace_training(
        lambda place: train(*place.fake_training(model, optimizer), place.fake_batch(batch)), CpuLowering()
    )
    traced = [trace.texts[name] for name in trace.ops.name]
    with Names() as real:
        train(model, optimizer, batch)
    assert without_looks(traced) == without_looks(real.names)


def test_nothing_is_in_another_place():
    def step(place):
        batch = place.fake_batch({"x": torch.zeros(4, 8)})
        nn.Linear(8, 8).to("cpu")(batch["x"].to("cpu")).sum().backward()

    assert not any(trace_training(step, CpuLowering()).storages.on_host)


def test_a_packed_lstm_that_is_traced_runs_for_real_afterwards():
    torch.manual_seed(0)
    layer, x = nn.LSTM(4, 8), torch.randn(5, 3, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]))
    before = layer(packed)[0].data

    def step(place):
        batch = place.fake_batch({"x": x, "lengths": torch.tensor([5, 3, 2])})
        inner = nn.utils.rnn.pack_padded_sequence(batch["x"], batch["lengths"])
        output, (hidden, _) = place.fake_model(layer)(inner)
        assert output.data.shape == before.shape
        assert hidden.shape == (1, 3, 8)

    trace_training(step, CpuLowering())
    assert torch.equal(layer(packed)[0].data, before)


def test_what_a_kernel_takes_beside_its_results_is_in_the_trace_as_scratch():
    def step(place):
        nn.Conv1d(16, 32, 3)(torch.randn(2, 16, 10))

    trace = trace_training(step, CpuLowering())
    scratch = [row for row, shape in enumerate(trace.storages.shape) if trace.texts[shape] == "scratch of the kernel"]
    # The larger of input and output in oneDNN's layout: 2 x 32 x 8 numbers of 4 bytes.
    assert [trace.storages.num_bytes[row] for row in scratch] == [2048]
    assert all(trace.storages.born[row] == trace.storages.died[row] for row in scratch)
