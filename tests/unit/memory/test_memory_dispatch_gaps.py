"""Effects that a dispatch mode changes or does not see: in-place sums of gradients, and resized storages."""

import pytest
import torch
from torch import nn

from plimsoll.memory.dispatch_gaps import noting_resizes
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import trace_training


class Residual(nn.Module):
    """A model with residual connections, an RMS norm and a tied output, so that nodes get several gradients."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.embed = nn.LayerNorm(10), nn.Linear(10, 10), nn.Embedding(20, 10)
        self.head = nn.Linear(10, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(3):
            x = x + self.linear(self.norm(x))
        return self.head(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))).logsumexp(-1).sum()


def sums_of_real_engine():
    loss = Residual()(torch.randint(0, 20, (3, 7)))
    with torch.profiler.profile() as profile:
        loss.backward()
    names = [event.name for event in profile.events()]
    return names.count("aten::add_"), names.count("aten::add")


def sums_of_trace(model_class):
    """Return how many sums in backward were in place, and how many made a tensor."""

    def train(place):
        model_class()(place.fake_batch(torch.randint(0, 20, (3, 7)))).backward()

    trace = trace_training(train, CudaLowering((8, 6)))
    ops = trace.ops
    sums = {
        row
        for row, (name, phase) in enumerate(zip(ops.name, ops.phase, strict=True))
        if trace.texts[name] == "aten.add.Tensor" and phase == "backward"
    }
    made = sums & set(trace.storages.born)
    return len(sums - made), len(made)


def test_a_trace_adds_in_place_what_the_engine_adds_in_place_on_real_tensors():
    in_place, made = sums_of_trace(Residual)

    assert (in_place, made) == sums_of_real_engine()
    assert in_place > made > 0


def test_a_sum_in_a_backward_of_the_users_own_makes_a_tensor():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            half = grad * 1.0
            return (half + grad) + half  # half is used again: adding to it would be wrong

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(7, 5)

        def forward(self, tokens):
            return Doubled.apply(super().forward(tokens.float())).sum()

    assert sums_of_trace(Model) == (0, 2)


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, at: x.index_select(0, at),
        lambda x, at: x[at],
        lambda x, at: x.gather(0, at.view(-1, 1).expand(-1, 8)),
        lambda x, at: x.max(1).values,
    ],
)
def test_what_a_backward_formula_fills_is_filled_in_place(pick):
    """The gradient is one tensor of the input's size, as on real tensors, instead of zeros and a filled copy."""

    def train(place):
        x = torch.zeros(6, 8, requires_grad=True)
        pick(x, place.fake_batch(torch.tensor([1, 3]))).sum().backward()

    trace = trace_training(train, CudaLowering((9, 0)))
    sizes = zip(trace.storages.num_bytes, trace.storages.born, strict=True)
    assert sum(size == 6 * 8 * 4 and trace.ops.phase[born] == "backward" for size, born in sizes) == 1


def test_each_resize_is_noted_after_it_happened():
    storage = torch.ones(8).untyped_storage()
    sizes = []
    with noting_resizes(lambda one: sizes.append(one.nbytes())):
        storage.resize_(0)
        storage.resize_(16)
    storage.resize_(4)
    assert sizes == [0, 16]


def test_torch_is_as_it_was_also_after_an_error_and_inside_another():
    before = torch.UntypedStorage.resize_
    first, second = [], []
    with noting_resizes(first.append), noting_resizes(second.append):
        torch.ones(2).untyped_storage().resize_(0)
    assert len(first) == len(second) == 1
    assert torch.UntypedStorage.resize_ is before
    assert "resize_" not in vars(torch.UntypedStorage)
