"""Logits that are not computed: operations that keep them lazy, and real logits for all others."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from plimsoll.errors import InputError
from plimsoll.techniques.mechanisms.lazy_logits import LazyLogits, Tally, lazy_linear

B, T, D, V = 3, 5, 4, 7


class Case:
    """A layer, its input, and its lazy and real logits."""

    def __init__(self, dtype=torch.float32):
        torch.manual_seed(0)
        self.head = nn.Linear(D, V, dtype=dtype)
        self.hidden = torch.randn(B, T, D, dtype=dtype, requires_grad=True)
        self.tally = Tally()

    def lazy(self):
        return lazy_linear(self.head, self.hidden, 2, self.tally)

    def plain(self):
        return self.head(self.hidden)

    def gradients(self, result):
        return torch.autograd.grad(result, [self.hidden, *self.head.parameters()])

    def assert_gives(self, function):
        """Assert that lazy logits give the value and gradients of real logits."""
        lazily, plainly = function(self.lazy()), function(self.plain())
        assert lazily.shape == plainly.shape
        assert lazily.dtype == plainly.dtype
        torch.testing.assert_close(lazily + 0, plainly + 0, rtol=1e-5, atol=1e-6)
        weights = torch.linspace(-1, 1, plainly.numel(), dtype=plainly.dtype).reshape(plainly.shape)
        pairs = zip(*(self.gradients((one * weights).sum()) for one in (lazily, plainly)), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        return lazily


MASK = torch.arange(B * T).reshape(B, T) % 2 == 0
STAY_LAZY = {
    "view": lambda x: x.view(-1, V),
    "view of size": lambda x: x.view(-1, x.size(-1)),
    "view of a list": lambda x: x.view([B * T, V]),
    "reshape": lambda x: torch.reshape(x, (T, B, V)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten to -2": lambda x: torch.flatten(x, end_dim=-2),
    "transpose": lambda x: x.transpose(1, 2),
    "transpose twice": lambda x: x.transpose(-1, 0).transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 1),
    "permute, to one again": lambda x: x.permute(2, 1, 0).permute(1, 2, 0).reshape(-1, V),
    "movedim": lambda x: torch.movedim(x, -1, 1),
    "contiguous": lambda x: x[:, :-1].contiguous().view(-1, V),
    "shifted": lambda x: x[..., :-1, :],
    "one position": lambda x: x[:, -1],
    "one sample": lambda x: x[1],
    "new dimension": lambda x: x[:, None, 1:],
    "all outputs": lambda x: x[:, 1:, :V],
    "mask": lambda x: x[MASK],
    "indices": lambda x: x[torch.tensor([2, 0]), :, :],
    "double": lambda x: x.double(),
    "float": lambda x: x.float(),
    "to a dtype": lambda x: x.to(torch.float64),
    "to a device": lambda x: x.to("cpu"),
    "to another": lambda x: x.to(torch.zeros(1)),
    "times": lambda x: x * 0.5,
    "times from the left": lambda x: 2 * x,
    "over": lambda x: x / 0.7,
}
BECOME_REAL = {
    "softmax": lambda x: x.softmax(-1),
    "sum": torch.sum,
    "plus a tensor": lambda x: x + torch.ones(V),
    "times a tensor": lambda x: x * torch.linspace(0, 1, V),
    "soft capping": lambda x: 3 * torch.tanh(x / 3),
    "some outputs": lambda x: x[..., :3],
    "outputs and samples joined": lambda x: x.reshape(-1),
    "another permutation joined": lambda x: x.transpose(1, 2).reshape(-1, T),
    "half": lambda x: x.to(torch.bfloat16).float(),
    "cat": lambda x: torch.cat([x, x]),
    "from the right": lambda x: torch.ones(2, B * T) @ x.view(-1, V),
    "class weights": lambda x: functional.cross_entropy(x[:, 0], torch.tensor([1, 2, 3]), weight=torch.rand(V)),
    "probabilities": lambda x: functional.cross_entropy(x[:, 0], torch.full((B, V), 1 / V)),
    "classes first": lambda x: functional.cross_entropy(x[0, 0], torch.tensor(1)),
    "a library's function": lambda x: Reversed.apply(x),
    "changed in place": lambda x: changed(x),
}


class Reversed(torch.autograd.Function):
    """A function of a library, unknown to torch functions, whose backward is not the gradient of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def changed(logits):
    logits[..., 0] = 0
    logits.mul_(2)
    return functional.cross_entropy(logits.reshape(-1, V), torch.arange(B * T) % V, reduction="none")


@pytest.mark.parametrize("name", STAY_LAZY)
def test_stays_lazy_and_gives_the_same(name):
    case = Case()
    assert isinstance(STAY_LAZY[name](case.lazy()), LazyLogits)
    assert case.tally.asked_by is None
    case.assert_gives(STAY_LAZY[name])


@pytest.mark.parametrize("name", BECOME_REAL)
def test_everything_else_gets_the_real_logits(name):
    torch.manual_seed(1)
    weights = torch.random.get_rng_state()

    def function(logits):
        torch.random.set_rng_state(weights)
        return BECOME_REAL[name](logits)

    result = Case().assert_gives(function)
    assert not isinstance(result, LazyLogits)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: functional.cross_entropy(x.view(-1, V), t.view(-1)),
        lambda x, t: functional.cross_entropy(x.transpose(1, 2), t, label_smoothing=0.2),
        lambda x, t: functional.cross_entropy(x.permute(0, 2, 1), t, reduction="none"),
        lambda x, t: nn.CrossEntropyLoss(reduction="sum")(x[:, 1:].flatten(0, 1), t[:, 1:].flatten()),
    ],
)
def test_cross_entropy_is_in_chunks(function):
    case = Case()
    target = torch.arange(B * T).reshape(B, T) % V
    target[0] = -100
    case.assert_gives(lambda logits: function(logits, target))
    assert (case.tally.num_chunked, case.tally.asked_by) == (1, None)


def test_it_looks_like_logits():
    lazy, plain = Case().lazy(), Case().plain()
    assert isinstance(lazy, torch.Tensor)
    for ask in (
        lambda x: x.shape, lambda x: x.dtype, lambda x: x.device, lambda x: x.dim(), lambda x: len(x),
        lambda x: x.numel(), lambda x: x.requires_grad, lambda x: x.is_leaf, lambda x: x.is_floating_point(),
        lambda x: x.element_size(), lambda x: x.layout,
    ):  # fmt: skip
        assert ask(lazy) == ask(plain)
    assert lazy.computed is None
    assert not lazy.detach().requires_grad
    assert lazy.tolist() == plain.tolist()


def test_logits_are_computed_once_and_with_their_graph_when_that_is_wanted():
    case = Case()
    lazy = case.lazy()
    with torch.no_grad():
        lazy.argmax(-1)
    assert case.tally.asked_by is None
    assert lazy.exp().requires_grad
    real = lazy.computed
    assert lazy.exp().requires_grad
    assert lazy.computed is real
    assert case.tally.asked_by == "exp"


def test_what_was_made_without_gradients_has_none_later():
    case, target = Case(), torch.arange(T)
    with torch.no_grad():
        without, views = case.lazy(), case.lazy()[0].view(T, V)
    kept = case.lazy().detach()
    for lazy in (without, views, kept):
        assert not lazy.requires_grad
        assert not functional.cross_entropy(lazy.reshape(-1, V)[:T], target).requires_grad
        assert not lazy.exp().requires_grad
    assert case.tally.num_chunked == 3


def test_a_gradient_hook_on_logits_fires():
    case, seen = Case(), []
    lazy = case.lazy()
    lazy.register_hook(lambda gradient: seen.append(gradient.shape))
    lazy.retain_grad()
    functional.cross_entropy(lazy.view(-1, V), torch.zeros(B * T, dtype=torch.long)).backward()
    assert seen == [(B, T, V)]
    assert lazy.grad.shape == (B, T, V)


def test_a_backward_hook_of_the_head_sees_the_gradient_of_the_logits():
    case, seen = Case(), []
    forward, tally = case.head.forward, case.tally
    case.head.register_full_backward_hook(lambda module, before, after: seen.append(after[0]))
    target = torch.arange(B * T) % V
    functional.cross_entropy(case.plain().view(-1, V), target).backward()
    case.head.forward = lambda hidden: lazy_linear(case.head, hidden, 2, tally)
    functional.cross_entropy(case.plain().view(-1, V), target).backward()
    assert forward.__func__ is nn.Linear.forward
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize("act", [lambda x: x.div_(2), lambda x: x.retain_grad(), lambda x: x.__setitem__(0, 0)])
def test_a_change_that_others_would_not_see_is_refused(act):
    lazy = Case().lazy()
    lazy.view(-1, V)
    with pytest.raises(InputError, match="call it before deriving them, or leave chunked_loss out"):
        act(lazy)


@pytest.mark.parametrize("use", [lambda x: x.sum(), lambda x: functional.cross_entropy(x[0], torch.zeros(T).long())])
def test_logits_of_another_time_are_refused(use):
    case = Case()
    lazy = case.lazy()
    with torch.no_grad():
        case.head.weight.mul_(2)
    with pytest.raises(InputError, match=r"use them before the optimizer's step"):
        use(lazy)


def test_autocast_gives_plain_autocasts_dtypes_and_bits():
    case = Case()
    with torch.autocast("cpu", torch.bfloat16):
        lazy, plain = case.lazy(), case.plain()
        assert lazy.dtype == plain.dtype == torch.bfloat16
        losses = [functional.cross_entropy(x[0], torch.arange(T)) for x in (lazy, plain)]
    assert torch.equal(lazy + 0, plain)
    assert [loss.dtype for loss in losses] == [torch.float32] * 2
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    double = Case(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert double.lazy().dtype == double.plain().dtype


def test_wrong_input_fails_as_it_does_without():
    case = Case()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        lazy_linear(case.head, torch.ones(2, D + 1), 2, case.tally)


def test_nothing_is_kept_when_the_logits_are_gone():
    case = Case()
    loss = functional.cross_entropy(case.lazy().view(-1, V), torch.zeros(B * T, dtype=torch.long))
    nodes, seen = [loss.grad_fn], []
    while nodes:
        node = nodes.pop()
        seen.append(node.name())
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    assert not any("_Node" in name for name in seen)
