"""A step is only retried if the retry is the same step: two passes from the same state must give the same result."""

from __future__ import annotations

import io
import itertools
import warnings

import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.errors import InputError, OutOfMemoryError, PlimsollWarning


def run_out():
    torch.empty(1 << 60, dtype=torch.uint8)


class Net(nn.Module):
    """A network that adds the value of ``noise()`` to its output."""

    def __init__(self, noise=lambda: 0.0):
        super().__init__()
        self.body, self.head, self.noise = nn.Linear(4, 8), nn.Linear(8, 3), [noise]

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))) + self.noise[0]() * torch.arange(3)


def batch_of(seed=0, num_samples=8):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, 4, generator=generator),
        "y": torch.randint(3, (num_samples,), generator=generator),
    }


def step_of(model, fails=(), **options):
    """Return a step whose loss runs out of memory in the calls `fails`; calls without 8 samples are checks."""
    calls = itertools.count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Loss:
        __module__ = "torch"  # objects of torch are not searched, so its counter is not restored

        def __call__(self, model, batch):
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            if len(batch["x"]) == 8 and next(calls) in fails:
                run_out()
            return loss

    return plimsoll.TrainStep(model, optimizer, Loss(), units="samples", never_cut=True, **options)


class Hidden:
    """An object that counts in the length of an in-memory file, where no search looks."""

    def __init__(self):
        self._file = io.BytesIO()

    def __call__(self):
        self._file.write(b".")
        return float(self._file.tell())

    def state_dict(self):
        return {"count": self._file.tell()}

    def load_state_dict(self, state):
        self._file.seek(state["count"])


def test_a_model_whose_state_is_seen_is_retried_without_a_word():
    torch.manual_seed(0)
    model = Net()
    with warnings.catch_warnings(action="error"):
        step = step_of(model, fails={0})
        step(batch_of())
    assert step._retry.is_exact
    assert step._retry.hidden is None


def test_the_check_leaves_nothing_behind():
    """The weights equal the weights of a plain loop, so the dropout masks are equal, too."""

    def trained(train):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        train(model)
        return torch.cat([value.flatten().double() for value in model.state_dict().values()])

    def plain(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            batch = batch_of(seed)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()

    def ours(model):
        step = step_of(model)
        for seed in range(3):
            step(batch_of(seed))

    assert torch.equal(trained(plain), trained(ours))


def test_state_that_is_not_seen_is_named_and_an_error_is_raised_in_place_of_a_retry():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Net(Hidden()))
    step = step_of(model, fails={1})
    with pytest.warns(PlimsollWarning, match="state that is not put back.*the first module.* is 1"):
        step(batch_of())
    before = [value.clone() for value in model.parameters()]
    with pytest.raises(OutOfMemoryError, match=r"not retried.*extra_state=\[.*allow_hidden_state=True"):
        step(batch_of(1))
    assert all(map(torch.equal, before, model.parameters()))


def test_what_is_given_as_extra_state_is_put_back():
    def trained(fails):
        torch.manual_seed(0)
        noise = Hidden()
        model = Net(noise)
        step = step_of(model, fails, extra_state=[noise])
        for seed in range(3):
            step(batch_of(seed))
        return [value.detach().clone() for value in model.parameters()], noise.state_dict()

    with warnings.catch_warnings(action="error"):
        (weights, count), (others, again) = trained({1}), trained(())
    assert all(map(torch.equal, weights, others))
    assert count == again == {"count": 3}


def test_extra_state_is_saved_with_the_step():
    noise = Hidden()
    step = step_of(Net(noise), extra_state=[noise])
    step(batch_of())
    state = step.state_dict()
    noise()
    step.load_state_dict(state)
    assert noise.state_dict() == {"count": 1}
    with pytest.raises(InputError, match="has the state of 0 objects, but extra_state has"):
        step.load_state_dict(state | {"extra_state": []})


def test_hidden_state_may_be_allowed_by_name():
    torch.manual_seed(0)
    step = step_of(Net(Hidden()), fails={1}, allow_hidden_state=True)
    with pytest.warns(PlimsollWarning, match="as allowed"):
        step(batch_of())
    assert step(batch_of(1)).oom_events


def test_an_iterator_of_what_is_given_as_extra_state_is_its_own():
    class Ticks:
        def __init__(self):
            self.numbers, self.count = iter(range(100)), 0

        def __call__(self):
            self.count = next(self.numbers)
            return float(self.count)

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.numbers, self.count = iter(range(state["count"] + 1, 100)), state["count"]

    torch.manual_seed(0)
    ticks = Ticks()
    step = step_of(Net(ticks), fails={1}, extra_state=[ticks])
    with warnings.catch_warnings(action="error"):
        step(batch_of())
        assert step(batch_of(1)).oom_events


def test_an_iterator_is_named_and_not_moved_by_the_check():
    torch.manual_seed(0)
    numbers = iter(range(100))
    step = step_of(Net(lambda: float(next(numbers))), fails={1})
    with pytest.warns(PlimsollWarning, match="numbers is an iterator") as said:
        step(batch_of())
    assert said[0].filename == __file__
    assert next(numbers) == 1
    with pytest.raises(OutOfMemoryError, match="numbers is an iterator"):
        step(batch_of(1))


def generated(values):
    yield from values


def repeated(values):
    while True:
        for value in values:  # noqa: UP028 - the iterator lies on the stack, and nowhere else
            yield value


ITERATORS = {
    "list": lambda: iter([1.0] * 99),
    "generator": lambda: repeated([1.0]),
    "over much": lambda: repeated([1.0] * 2000),
    "delegating": lambda: generated([1.0] * 99),
    "zip": lambda: zip([1.0] * 99, generated([1.0] * 99), strict=True),
    "map": lambda: map(float, [1.0] * 99),
    "enumerate": lambda: enumerate([1.0] * 99),
    "cycle": lambda: itertools.cycle([1.0]),
    "islice": lambda: itertools.islice([1.0] * 99, 50),
    "chain": lambda: itertools.chain([1.0] * 99, [1.0]),
    "dict": lambda: iter(dict.fromkeys(range(99), 1.0)),
    "begun": lambda: next(one := repeated([1.0])) and one,
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_no_step_moves_is_in_nobodys_way(kind):
    torch.manual_seed(0)
    numbers = ITERATORS[kind]()
    step = step_of(Net(lambda: 1.0 if numbers else 0.0), fails={2})
    with warnings.catch_warnings(action="error"):
        step(batch_of())
        step(batch_of(1))  # which is compared now
        assert step(batch_of(2)).oom_events
    assert step._retry.is_exact


@pytest.mark.parametrize("fails", [{0}, {2}])
@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_moves_only_now_is_named_though_it_yields_the_same_again(kind, fails):
    torch.manual_seed(0)
    numbers, is_used = ITERATORS[kind](), [0 in fails]
    step = step_of(Net(lambda: float(bool(next(numbers))) if is_used[0] else 1.0), fails=fails)
    for number in range(max(fails)):
        step(batch_of(number))
    is_used[0] = True
    with pytest.raises(OutOfMemoryError, match="numbers"):
        step(batch_of(2))


@pytest.mark.filterwarnings("ignore:memory ran out while two passes")
def test_what_only_failures_change_is_left_where_nothing_else_is_left_to_try():
    torch.manual_seed(0)
    left = [True]

    def loss(model, batch):
        if left and left.pop():
            run_out()
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    model = Net()
    step = plimsoll.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, units="samples")
    assert step(batch_of()).micro_batch == 4
    assert not left


@pytest.mark.filterwarnings("ignore:memory ran out while two passes")
def test_state_that_passes_change_is_put_back_although_failures_changed_it():
    torch.manual_seed(0)
    left, seen = [True], []

    def loss(model, batch):
        seen.append(len(batch["x"]))
        if left and left.pop():
            run_out()
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    model = Net()
    step = plimsoll.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, units="samples")
    assert step(batch_of()).micro_batch == 4
    assert seen == [4, 4]


def test_where_there_was_no_memory_to_compare_it_is_said_and_done_in_the_next_step():
    """The state that the first pass has changed cannot be named at that time."""
    torch.manual_seed(0)
    hidden, fails = Hidden(), [True]

    def loss(model, batch):
        value = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        if fails and fails.pop():
            run_out()
        return value

    loss.__module__ = "torch"  # not looked into
    model = Net(hidden)
    step = plimsoll.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, units="samples", never_cut=True)
    with pytest.warns(PlimsollWarning, match="memory ran out while two passes of the same samples were compared"):
        step(batch_of())
    with pytest.warns(PlimsollWarning, match="there is state that is not put back"):
        step(batch_of(1))


def test_a_failed_undo_is_tried_again_and_then_says_that_the_step_is_torn():
    model = Net()
    step = step_of(model)
    failures = [run_out]
    step._retry.put_back(lambda: failures.pop()() if failures else None)
    with pytest.raises(plimsoll.errors.TornStepError, match="while step 1 was undone"):
        step._retry.put_back(run_out)


def test_gradients_that_are_not_the_steps_stay_as_they_are():
    """An example is a tensor that the user's loop updates."""
    torch.manual_seed(0)
    model, delta = Net(), torch.zeros(4, requires_grad=True)
    delta.grad = torch.ones(4)

    class Loss:
        def __call__(self, model, batch):
            return nn.functional.cross_entropy(model(batch["x"] + delta), batch["y"])

    batch = batch_of()
    wanted = torch.autograd.grad(Loss()(model, batch), delta)[0] + 1
    step = plimsoll.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), Loss(), units="samples")
    step(batch)
    assert torch.equal(delta.grad, wanted)


@pytest.mark.parametrize(
    "parameter", [torch.zeros(0), torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.float64)]
)
def test_parameters_of_any_kind_are_compared(parameter):
    torch.manual_seed(0)
    model = Net()
    model.other = nn.Parameter(parameter)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]) + model.other.abs().sum()

    step = plimsoll.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, units="samples")
    step(batch_of())
    assert step._retry.is_exact


def test_another_optimizer_that_the_loss_steps_is_put_back_after_the_check():
    def trained(train):
        torch.manual_seed(0)
        model, critic = Net(), nn.Linear(4, 1)
        inner = torch.optim.Adam(critic.parameters(), lr=0.1)

        def loss(model, batch):
            inner.zero_grad()
            critic(batch["x"]).square().mean().backward()
            inner.step()
            return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

        train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
        return critic.weight.detach(), inner.state[critic.weight]["step"]

    def plain(model, optimizer, loss):
        for seed in range(3):
            optimizer.zero_grad()
            loss(model, batch_of(seed)).backward()
            optimizer.step()

    def ours(model, optimizer, loss):
        step = plimsoll.TrainStep(model, optimizer, loss, units="samples", never_cut=True)
        for seed in range(3):
            step(batch_of(seed))

    assert all(map(torch.equal, trained(plain), trained(ours)))


def test_what_the_loop_brings_between_two_steps_is_put_back():
    def trained(fails):
        torch.manual_seed(0)
        model = Net()
        kept = model.forward
        model.forward = lambda x: model.history.append(len(model.history)) or kept(x) * len(model.history)
        step = step_of(model, fails=fails)
        for seed in range(6):
            model.history = [0] if seed % 2 else [*model.history, 0] if seed else []
            step(batch_of(seed))
        return model.state_dict()["body.weight"]

    assert all(torch.equal(trained(()), trained({number})) for number in range(6))
