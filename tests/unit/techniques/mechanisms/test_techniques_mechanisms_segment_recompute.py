"""A chain in segments has the gradients of the whole chain, and retains no more than promised."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from plimsoll.errors import InputError
from plimsoll.models.recurrent.segments import Passed
from plimsoll.techniques.mechanisms.segment_recompute import Walk, equal_spans, over_time

WIDTH, STEPS, SAMPLES = 3, 11, 2


def chain(segment, state, slices, weight, bias):
    """Run ``state = tanh(state W + input + b)``, and sum up all states."""
    (inputs,) = slices
    hidden = state[0] if state else torch.zeros(SAMPLES, WIDTH, dtype=inputs.dtype)
    outputs = []
    for step in range(inputs.shape[0]):
        hidden = torch.tanh(hidden @ weight + inputs[step] + bias)
        outputs.append(hidden)
    stacked = torch.stack(outputs)
    return Passed((stacked,), (stacked.square().sum(),), (hidden,))


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,), "inputs": (STEPS, SAMPLES, WIDTH), "state": (SAMPLES, WIDTH)}
    return {
        name: torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for name, shape in shapes.items()
    }


def walked(given, segment_steps=None, has_state=True, **options):
    def run(segment, state, slices):
        return chain(segment, state, slices, given["weight"], given["bias"])

    state = (given["state"],) if has_state else ()
    if segment_steps is None:
        return run(0, state, (given["inputs"],))
    walk = Walk(run, equal_spans(STEPS, segment_steps), 0, **options)
    return over_time(walk, (given["inputs"],), state, (given["weight"], given["bias"]))


def loss_of(passed):
    weights = torch.linspace(-1, 1, passed.outputs[0].numel(), dtype=passed.outputs[0].dtype)
    return (passed.outputs[0].flatten() * weights).sum() + 2 * passed.sums[0] + passed.state[0].exp().sum()


def gradients(passed, given):
    found = torch.autograd.grad(loss_of(passed), list(given.values()), allow_unused=True)
    return dict(zip(given, found, strict=True))


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("num_slots", [None, 0, 1, 2, 99])
@pytest.mark.parametrize("segment_steps", [1, 3, 5, 11])
def test_gradients_of_outputs_sums_and_state(segment_steps, num_slots, has_state):
    given = tensors()
    expected = gradients(walked(given, has_state=has_state), given)
    found = gradients(walked(given, segment_steps, has_state, num_slots=num_slots), given)
    for name, one in expected.items():
        assert (one is None) == (found[name] is None), name
        if one is not None:
            torch.testing.assert_close(found[name], one, rtol=1e-12, atol=1e-12)


def test_without_gradients_nothing_is_kept():
    given = tensors()
    with torch.no_grad():
        passed = walked(given, 3)
    assert not passed.sums[0].requires_grad
    torch.testing.assert_close(passed.outputs[0], walked(given).outputs[0])


def test_only_what_needs_a_gradient_gets_one():
    given = tensors()
    given["inputs"].requires_grad_(False)
    given["bias"].requires_grad_(False)
    loss_of(walked(given, 3)).backward()
    assert given["inputs"].grad is None
    assert given["bias"].grad is None
    assert given["weight"].grad is not None


def test_gradients_arrive_once_at_what_hangs_on_them():
    given = tensors()
    calls = []
    given["weight"].register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.clone()))
    loss_of(walked(given, 2)).backward()
    assert len(calls) == 1
    expected = tensors()
    torch.testing.assert_close(calls[0], gradients(walked(expected), expected)["weight"])


@pytest.mark.parametrize("num_slots", [None, 1])
def test_dropout_draws_the_same_again(num_slots):
    """The plain chain over the same segments draws in the same order."""
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64).requires_grad_()
    inputs = torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64)

    def run(segment, state, slices):
        hidden = torch.tanh(functional.dropout(slices[0], 0.5) @ weight + (state[0] if state else 0.0))
        return Passed(sums=(hidden.square().sum(),), state=(hidden[-1],))

    def plain():
        state, total = (), 0.0
        for start, length in equal_spans(STEPS, 3):
            passed = run(0, state, (inputs[start : start + length],))
            state, total = passed.state, total + passed.sums[0]
        return total

    def in_segments():
        return over_time(Walk(run, equal_spans(STEPS, 3), 0, num_slots), (inputs,), (), (weight,)).sums[0]

    found = []
    for compute in (plain, in_segments):
        torch.manual_seed(5)
        loss = compute()
        after = torch.get_rng_state()
        (gradient,) = torch.autograd.grad(loss, weight)
        assert torch.equal(after, torch.get_rng_state()), "backward leaves the random numbers as they were"
        found.append((loss.detach(), gradient))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_autocast_is_in_backward_what_it_was_in_forward():
    layer = nn.Linear(WIDTH, WIDTH)
    inputs = torch.randn(STEPS, SAMPLES, WIDTH)
    seen = []

    def run(segment, state, slices):
        hidden = layer(slices[0])
        seen.append(hidden.dtype)
        return Passed(sums=(hidden.float().sum(),), state=(hidden[-1],))

    with torch.autocast("cpu", torch.bfloat16):
        loss = over_time(Walk(run, equal_spans(STEPS, 4), 0), (inputs,), (), tuple(layer.parameters())).sums[0]
    loss.backward()
    assert seen == [torch.bfloat16] * 6
    expected = nn.Linear(WIDTH, WIDTH)
    expected.load_state_dict(layer.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        expected(inputs).float().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected.weight.grad, rtol=2e-2, atol=2e-2)


def test_a_row_lookup_is_added_up_in_one_dense_gradient_unless_it_is_to_stay_sparse():
    table = torch.randn(50, WIDTH, dtype=torch.float64).requires_grad_()
    ids = torch.randint(0, 50, (STEPS, SAMPLES))

    def run(segment, state, slices):
        return Passed(sums=(functional.embedding(slices[0], table, sparse=True).square().sum(),))

    def gradient(sparse):
        walk = Walk(run, equal_spans(STEPS, 3), 0, sparse=sparse)
        return torch.autograd.grad(over_time(walk, (ids,), (), (table,)).sums[0], table)[0]

    (expected,) = torch.autograd.grad(functional.embedding(ids, table).square().sum(), table)
    dense, sparse = gradient(frozenset()), gradient(frozenset({0}))
    assert dense.layout is torch.strided
    assert sparse.layout is torch.sparse_coo
    torch.testing.assert_close(dense, expected)
    torch.testing.assert_close(sparse.to_dense(), expected)


@pytest.mark.parametrize("truncates", [False, True])
def test_parameters_that_share_a_gradient_each_get_it_once(truncates):
    """torch returns one gradient tensor for both parameters of a sum."""
    base, delta = (torch.randn(WIDTH, dtype=torch.float64).requires_grad_() for _ in range(2))
    inputs = torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64)

    def run(segment, state, slices):
        return Passed(sums=((slices[0] * (base + delta)).square().sum(),))

    walk = Walk(run, equal_spans(STEPS, 2), 0, truncates=truncates)
    loss = 3 * over_time(walk, (inputs,), (), (base, delta)).sums[0]
    found = torch.autograd.grad(loss, (base, delta))
    expected = torch.autograd.grad(3 * (inputs * (base + delta)).square().sum(), (base, delta))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("truncates", [False, True])
def test_a_parameter_that_is_given_twice_gets_its_gradient_once(truncates):
    weight = torch.randn(WIDTH, dtype=torch.float64).requires_grad_()
    inputs = torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64)

    def run(segment, state, slices):
        return Passed(sums=((slices[0] * weight).square().sum(),))

    walk = Walk(run, equal_spans(STEPS, 2), 0, truncates=truncates)
    found = torch.autograd.grad(over_time(walk, (inputs,), (), (weight, weight)).sums[0], weight)
    torch.testing.assert_close(found, torch.autograd.grad((inputs * weight).square().sum(), weight))


def test_one_tensor_may_be_two_parts_of_the_state():
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64).requires_grad_()
    inputs = torch.randn(STEPS, SAMPLES, WIDTH, dtype=torch.float64)
    first = torch.randn(SAMPLES, WIDTH, dtype=torch.float64).requires_grad_()

    def run(segment, state, slices):
        one, two = state
        for step_input in slices[0]:
            one = two = torch.tanh(one @ weight + 0.5 * two + step_input)
        return Passed(state=(one, two))

    def loss_of(passed):
        return passed.state[0].sum() + 2 * passed.state[1].square().sum()

    found = over_time(Walk(run, equal_spans(STEPS, 3), 0), (inputs,), (first, first), (weight,))
    expected = run(0, (first, first), (inputs,))
    wanted = (weight, first)
    torch.testing.assert_close(
        torch.autograd.grad(loss_of(found), wanted), torch.autograd.grad(loss_of(expected), wanted)
    )


def test_a_hook_that_would_see_parts_is_refused():
    given = tensors()
    given["weight"].register_hook(lambda gradient: gradient / 2)
    with pytest.raises(InputError, match="use register_post_accumulate_grad_hook"):
        walked(given, 3)


# -- truncated ---------------------------------------------------------------------------------------------------------


def test_truncated_gradients_end_where_a_segment_begins():
    given = tensors()

    def run(segment, state, slices):
        passed = chain(segment, state, slices, given["weight"], given["bias"])
        return Passed(sums=passed.sums, state=passed.state)

    walk = Walk(run, equal_spans(STEPS, 4), 0, truncates=True)
    passed = over_time(walk, (given["inputs"],), (given["state"],), (given["weight"], given["bias"]))
    (3 * passed.sums[0]).backward()
    assert not passed.state[0].requires_grad
    assert given["state"].grad is None
    other = tensors()
    state, total = (other["state"].detach(),), 0.0
    for start, length in equal_spans(STEPS, 4):
        part = chain(0, state, (other["inputs"][start : start + length],), other["weight"], other["bias"])
        state, total = (part.state[0].detach(),), total + part.sums[0]
    (3 * total).backward()
    for name in ("weight", "bias", "inputs"):
        torch.testing.assert_close(given[name].grad, other[name].grad, rtol=1e-12, atol=1e-12)


def test_truncated_segments_give_nothing_but_one_sum():
    given = tensors()
    with pytest.raises(InputError, match=r"returns 1 outputs and 1 sums: use time_segments"):
        walked(given, 3, truncates=True)


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_no_more_than_one_segment_is_alive():
    """At any time, only the results of `run` for one segment are alive, and states."""
    alive, most = weakref.WeakSet(), []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.mark = Mark()
            alive.add(ctx.mark)
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            most.append(len(alive))
            return gradient

    class Mark:
        pass

    weight = torch.ones(WIDTH, requires_grad=True)

    def run(segment, state, slices):
        return Passed(sums=((Marked.apply(slices[0] * weight)).sum(),), state=(slices[0][-1] * weight,))

    over_time(Walk(run, equal_spans(STEPS, 2), 0), (torch.randn(STEPS, WIDTH),), (), (weight,)).sums[0].backward()
    gc.collect()
    assert most == [1] * 6
    assert not alive


def test_it_is_differentiated_once():
    given = tensors()
    loss = loss_of(walked(given, 3))
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="a second time"):
        loss.backward()
    with pytest.raises(InputError, match="create_graph=True"):
        loss_of(walked(given, 3)).backward(create_graph=True)
