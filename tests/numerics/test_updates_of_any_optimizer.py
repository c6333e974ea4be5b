"""Updates of any optimizer, wherever it keeps its states: after an out-of-memory error they equal the plain loop's.

Each optimizer here keeps something in another place. Memory runs out at one allocation of its third update after
another, with the allocator's own error. Weights, states and values of hooks must equal plain PyTorch in all bits.
Then every allocation fails from one on, until the step gives up. All values must then be as before the step.
"""

import ctypes
from collections import deque
from threading import local

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll import TrainStep
from plimsoll.errors import OutOfMemoryError, TornStepError
from plimsoll.step.failpoints import exhaust_memory
from plimsoll.step.update.commit import StepCommit

NUM_STEPS, AT_STEP = 4, 2


class Own(torch.optim.Optimizer):
    """An optimizer with its own `step`; `kept` is compared."""

    def __init__(self, parameters, **defaults):
        super().__init__(parameters, {"lr": 0.1, **defaults})
        self.kept = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def begin(self, group):
        """Run before the parameters of a group are updated."""


class Nested(Own):
    def update(self, parameter, gradient, group):
        state = self.state[parameter].setdefault(
            "deep", {"mean": torch.zeros_like(parameter), "t": 0, "last": deque(maxlen=2), "both": [torch.zeros(1), ()]}
        )
        state["t"] += 1
        state["mean"].mul_(0.9).add_(gradient * 0.1)
        state["last"].append(gradient.norm() + 1)
        state["both"][0].add_(gradient.abs().sum())
        parameter.sub_(state["mean"] * (state["t"] / (sum(state["last"]) + state["both"][0])))


class InNumpy(Own):
    def update(self, parameter, gradient, group):
        total = self.state[parameter].setdefault("total", numpy.zeros(parameter.shape, numpy.float32))
        total += gradient.numpy()
        parameter.sub_(torch.tensor(total) * 0.1)


class InTheGroup(Own):
    def __init__(self, parameters):
        super().__init__(parameters, d=torch.tensor(1.0), k=0, seen=[])

    def begin(self, group):
        group["d"].mul_(1.5)
        group["k"] += 1
        group["seen"].append(group["k"])

    def update(self, parameter, gradient, group):
        parameter.sub_(gradient * group["d"] * (0.1 / len(group["seen"])))


class InAttributes(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.t, self.scale, self.history = 0, torch.ones(()), []

    def begin(self, group):
        self.t += 1
        self.scale.mul_(0.9)
        self.history = [*self.history, self.t]
        self.newest = self.scale * self.t

    def update(self, parameter, gradient, group):
        parameter.sub_(gradient * self.newest / (1 - 0.9 ** len(self.history)))


class UnderItsName(Own):
    def begin(self, group):
        total = self.state["total"].setdefault("norm", torch.zeros(()))
        total.add_(torch.stack([parameter.grad.norm() for parameter in group["params"]]).norm())

    def update(self, parameter, gradient, group):
        parameter.sub_(gradient / (1 + self.state["total"]["norm"]))


class ExchangesItsMemory(Own):
    def update(self, parameter, gradient, group):
        parameter.data = parameter.data - gradient * 0.1
        self.state[parameter]["old"] = self.state[parameter].get("old", 0) + parameter.data.clone()


class ChangesGradients(Own):
    def update(self, parameter, gradient, group):
        parameter.grad.data.add_(parameter.data, alpha=0.01)
        parameter.sub_(gradient * 0.1)


class ExchangesGradients(Own):
    def update(self, parameter, gradient, group):
        parameter.grad = gradient / (gradient.norm() + 1)
        parameter.sub_(parameter.grad * 0.1)


class ChangesThemNowAndThen(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.t = 0

    def begin(self, group):
        self.t += 1

    def update(self, parameter, gradient, group):
        if self.t == AT_STEP + 1:
            gradient.mul_(0.5)
        parameter.sub_(gradient * 0.1)


class DrawsNumbers(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(3)

    def update(self, parameter, gradient, group):
        noise = torch.randn(parameter.shape, generator=self.generator) + torch.randn(parameter.shape)
        parameter.sub_((gradient + noise * float(numpy.random.rand())) * 0.1)


class Slow:
    """An optimizer with state in slots, and a class whose attribute counts, too."""

    num_updates = 0
    __slots__ = ("values",)

    def __init__(self, values):
        self.values = values


class InSlots(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        Slow.num_updates = 0

    def update(self, parameter, gradient, group):
        slow = self.state[parameter].setdefault("slow", Slow(parameter.clone()))
        Slow.num_updates += 1
        parameter.sub_(gradient * (0.1 / Slow.num_updates))
        slow.values = slow.values.lerp(parameter, 0.5)
        parameter.copy_(slow.values)


class InMemoryOfC(Own):
    """An optimizer that counts in a ctypes structure, in a memoryview and per thread."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.numbers, self.view, self.local = (ctypes.c_double * 2)(), memoryview(bytearray(8)).cast("d"), local()
        self.local.count = 0

    def update(self, parameter, gradient, group):
        self.numbers[1] += 1
        self.view[0] += self.numbers[1]
        self.local.count += self.view[0]
        parameter.sub_(gradient * (0.1 / self.local.count))


class CountsInAGenerator(Own):
    """An optimizer with a generator, whose position nobody can restore."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.counts = (number for number in range(1, 100))

    def update(self, parameter, gradient, group):
        parameter.sub_(gradient * 0.1 / next(self.counts))


class Around(torch.optim.Optimizer):
    """An optimizer around another one, without hooks of its own."""

    def __init__(self, parameters):
        self.inner, self.t = torch.optim.AdamW(parameters, lr=0.1), 0
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]

    @property
    def state(self):
        return self.inner.state

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.t += 1
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
            parameter.copy_(slow.lerp_(parameter, 0.5 / self.t))


class Unused(Own):
    """An optimizer that decays all parameters in the order of the groups, also those without gradients."""

    def update(self, parameter, gradient, group):
        parameter.sub_(gradient * group["lr"])

    def begin(self, group):
        self.first = group["params"][0] if group["params"] else self.first
        for parameter in group["params"]:
            parameter.mul_(0.99 - 0.001 * float(self.first.abs().mean()))


def unused(parameters):
    parameters[1].requires_grad_(False)
    return Unused([{"params": parameters[1:]}, {"params": []}, {"params": parameters[:1], "lr": 0.2}])


def expanded(parameters):
    optimizer = Nested(parameters)
    optimizer.state[parameters[0]]["ones"] = torch.ones(1).expand(3)
    optimizer.state[parameters[0]]["sparse"] = torch.eye(2).to_sparse()
    return optimizer


def averaged(parameters):
    """Return AdamW with an average of the weights, counters and clipping in hooks."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    average, counts = [parameter.detach().clone() for parameter in parameters], {"pre": 0, "post": 0}

    def before(*_):
        counts["pre"] += 1
        nn.utils.clip_grad_norm_(parameters, 0.5 / counts["pre"])

    def after(*_):
        counts["post"] += 1
        for number, (one, parameter) in enumerate(zip(average, parameters, strict=True)):
            average[number] = one.lerp_(parameter.detach() * 1, 0.5 / counts["post"])

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.kept = average, counts
    return optimizer


def averaged_by_torch(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(nn.ParameterList(parameters))
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(nn.ParameterList(parameters)))
    optimizer.kept = average.state_dict(keep_vars=True)
    return optimizer


def in_pieces(kind, **settings):
    return lambda parameters: kind(parameters, lr=0.1, **settings)


IN_PIECES = {
    "Nesterov, foreach": in_pieces(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True),
    "Rprop, foreach": in_pieces(torch.optim.Rprop, foreach=True),
}

OPTIMIZERS = IN_PIECES | {
    **{kind.__name__: kind for kind in (
        Nested, InNumpy, InTheGroup, InAttributes, UnderItsName, ExchangesItsMemory, ChangesGradients,
        ExchangesGradients, ChangesThemNowAndThen, DrawsNumbers, InSlots, InMemoryOfC, Around,
    )},
    "parameters without gradients, and an empty group": unused,
    "expanded and sparse states": expanded,
    "an average in hooks": averaged,
    "torch's average in a hook": averaged_by_torch,
}  # fmt: skip


class Failing(TorchDispatchMode):
    """A dispatch mode that counts allocations and raises out-of-memory errors at chosen ones."""

    def __init__(self, fails):
        super().__init__()
        self.fails, self.count = fails, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_new = any(one.alias_info is None for one in func._schema.returns)
        if is_new and isinstance(result, torch.Tensor) and result.numel():
            self.count += 1
            if self.fails(self.count):
                exhaust_memory()
        return result


class Training:
    def __init__(self, make):
        torch.manual_seed(0)
        numpy.random.seed(0)
        self.model = nn.ParameterList([nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))])
        self.optimizer = make(list(self.model))
        self.commit, self.is_plain = None, True

    def by_steps(self, num_steps, fails=lambda count: False):
        """Continue to step `num_steps`; `fails` chooses the allocations that fail in the update after `AT_STEP`."""
        if self.is_plain:
            self.is_plain = False
            self.step = TrainStep(self.model, self.optimizer, loss, units="samples")
            self.commit = self.step._commit = StepCommit(
                self.optimizer, self.step.backend, self.step.position, chunk_bytes=1
            )
            self.failing, self.update = Failing(fails), self.commit.step
            self.commit.step = self.failing_update
        for number in range(self.step.num_steps, num_steps):
            self.step(batch_of(number))
        return self

    def failing_update(self):
        if self.step.num_steps != AT_STEP:
            return self.update()
        with self.failing:
            self.update()

    def by_hand(self):
        for number in range(NUM_STEPS):
            self.optimizer.zero_grad() if hasattr(self.optimizer, "_zero_grad_profile_name") else self.drop_gradients()
            loss(self.model, batch_of(number)).backward()
            self.optimizer.step()
        return self

    def drop_gradients(self):
        for parameter in self.model:
            parameter.grad = None

    def state(self):
        attributes = {
            name: value for name, value in vars(self.optimizer).items() if "hook" not in name and name != "step"
        }
        return [*bits([list(self.model), attributes, Slow.num_updates, torch.get_rng_state()])]


def loss(model, batch):
    return ((batch["x"] @ model[0] + model[1]) ** 2).mean()


def batch_of(number):
    return {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(number))}


def bits(value):
    """Yield all contents of a value in order, in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        yield value.detach().to_dense().tolist()
    elif isinstance(value, numpy.ndarray):
        yield value.tolist()
    elif isinstance(value, torch.Generator):
        yield value.get_state().tolist()
    elif isinstance(value, memoryview | ctypes.Array):
        yield list(value)
    elif isinstance(value, local):
        yield from bits(vars(value))
    elif isinstance(value, dict):
        yield from (one for key, item in value.items() for one in (str(type(key)), *bits(item)))
    elif isinstance(value, list | tuple | deque):
        yield from (one for item in value for one in bits(item))
    elif isinstance(value, Slow):
        yield from bits(value.values)
    elif isinstance(value, torch.optim.Optimizer):
        yield from bits([value.state, value.param_groups])
    else:
        assert value is None or isinstance(value, int | float | str), value
        yield value


def spread(most, wanted):
    """Return `num` of the numbers up to `most`, including the first and the last."""
    return sorted({1 + index * (most - 1) // (wanted - 1) for index in range(wanted)})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_fails_anywhere_is_that_of_the_plain_loop(name):
    make = OPTIMIZERS[name]
    expected = Training(make).by_hand().state()
    clean = Training(make).by_steps(NUM_STEPS)
    assert clean.state() == expected
    assert clean.failing.count > 1
    for number in spread(clean.failing.count, 8):
        failed = Training(make).by_steps(NUM_STEPS, lambda count, number=number: count == number)
        assert failed.state() == expected, f"allocation {number} of {clean.failing.count}"
        assert failed.step.micro_batch == 4  # only the update was repeated


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_has_no_room_leaves_everything_as_it_was(name):
    make = OPTIMIZERS[name]
    before = Training(make).by_steps(AT_STEP).state()
    num_allocations = Training(make).by_steps(NUM_STEPS).failing.count
    for number in [1] if name in IN_PIECES else spread(num_allocations, 3):  # later chunks would be torn
        failed = Training(make)
        with pytest.raises(OutOfMemoryError, match="the step was undone"):
            failed.by_steps(NUM_STEPS, lambda count, number=number: count >= number)
        assert failed.state() == before, f"from allocation {number} of {num_allocations} on"
        assert failed.step.num_steps == AT_STEP


def test_an_update_that_moves_an_iterator_and_fails_is_named():
    failed = Training(CountsInAGenerator)
    with pytest.raises(TornStepError, match=r"the position of optimizer\.counts cannot be put back"):
        failed.by_steps(NUM_STEPS, lambda count: count == 2)
    clean = Training(CountsInAGenerator).by_steps(NUM_STEPS)
    untouched = Training(CountsInAGenerator).by_steps(NUM_STEPS, lambda count: count == 1)  # not advanced
    assert [p.tolist() for p in untouched.model] == [p.tolist() for p in clean.model]
