"""Trainings of `storm.py` whose loop changes state between batches, or has several updates, or windows of batches.

The changes belong to the loop: no step may undo or repeat them.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

import _storm_kept
import _storm_losses
import _storm_recipes
import _storm_states
from _storm_models import CLASSES, WIDTH, Net, adamw, classified, mlp, trained
from _storm_run import Kind, Training, Turn

WINDOW = 2
LARGE = 400_000
"""Elements of a tensor that is large enough not to be copied before a write to it was observed."""


class Told(NamedTuple):
    """A piece of the model's state, the function that the loop calls on it before each batch, and how a pass reads it.

    A pass may change the state, too.
    """

    kept: Callable[[], Any]
    told: Callable[[Any, int], object]
    read: Callable[[Any, Tensor], Any] = lambda model, h: 0.0


class Hearing(Net):
    """A net with ``kept``, a buffer if it is a tensor, that scales its output by it."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.read, kept = told.read, told.kept()
        if isinstance(kept, Tensor):
            self.register_buffer("kept", kept)
        else:
            self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.b(h) * (1 + 0.01 * self.read(self, h.detach()))


class Holder:
    """An object with state that both the loop and a pass hold."""

    def __init__(self) -> None:
        self.count, self.items = 0, []

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "items": list(self.items)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.items = state["count"], list(state["items"])


def set_kept(value: Callable[[int], Any]) -> Callable[[Any, int], None]:
    def told(model: Any, number: int) -> None:
        model.kept = value(number)

    return told


def on_kept(change: Callable[[Any, int], object]) -> Callable[[Any, int], object]:
    return lambda model, number: change(model.kept, number)


def the_mean(model: Any, _: Tensor) -> Any:
    return model.kept.mean()


def the_value(model: Any, _: Tensor) -> Any:
    return float(model.kept)


def the_sum(model: Any, _: Tensor) -> Any:
    return float(sum(model.kept))


def noise(model: Any, h: Tensor) -> Any:
    return torch.rand(len(h), CLASSES, generator=model.kept)


def one_more(model: Any, _: Tensor) -> int:
    model.kept += 1
    return model.kept


def written(model: Any, h: Tensor) -> Tensor:
    model.kept[: len(h[0])] += h.mean(0)
    return model.kept.mean()


def written_last(model: Any, h: Tensor) -> Tensor:
    """Write to the newest tensor that the loop has added."""
    if model.kept:
        model.kept[-1].add_(h.mean())
    return sum((one.mean() for one in model.kept), torch.zeros(()))


def counted_last(model: Any, _: Tensor) -> int:
    if model.kept:
        model.kept[-1].count += 1
    return sum(one.count for one in model.kept)


def grown(model: Any, h: Tensor) -> float:
    model.kept.append(float(h.mean()))
    return float(sum(model.kept))


def grown_dict(model: Any, h: Tensor) -> float:
    model.kept["sum"] = model.kept.get("sum", 0.0) + float(h.mean())
    return float(sum(model.kept.values()))


def numpy_written(model: Any, h: Tensor) -> float:
    model.kept[:WIDTH] += h.mean(0).numpy()
    return float(model.kept.mean())


def counted_item(model: Any, _: Tensor) -> float:
    model.kept.items.append(model.kept.count)
    return float(sum(model.kept.items))


TOLD: dict[str, Told] = {
    "counts batches": Told(int, lambda model, _: setattr(model, "kept", model.kept + 1)),
    "counts batches, and is read": Told(int, lambda model, _: setattr(model, "kept", model.kept + 1), the_value),
    "counts batches, as passes do": Told(int, lambda model, _: setattr(model, "kept", model.kept + 1), one_more),
    "exchanges a buffer": Told(lambda: torch.zeros(WIDTH), set_kept(lambda n: torch.full((WIDTH,), n + 1.0)), the_mean),
    "exchanges a buffer that passes write": Told(
        lambda: torch.zeros(WIDTH), set_kept(lambda n: torch.full((WIDTH,), n + 1.0)), written
    ),
    "writes a buffer": Told(lambda: torch.zeros(WIDTH), on_kept(lambda kept, n: kept.add_(n + 1)), the_mean),
    "writes a buffer, as passes do": Told(
        lambda: torch.zeros(WIDTH), on_kept(lambda kept, n: kept.add_(n + 1)), written
    ),
    "writes a buffer through .data": Told(
        lambda: torch.zeros(WIDTH), on_kept(lambda kept, n: kept.data.fill_(n + 1)), the_mean
    ),
    "writes a large buffer": Told(lambda: torch.zeros(LARGE), on_kept(lambda kept, n: kept.add_(n + 1)), the_mean),
    "writes a large buffer, as passes do": Told(
        lambda: torch.zeros(LARGE), on_kept(lambda kept, n: kept.add_(n + 1)), written
    ),
    "exchanges a large buffer that passes write": Told(
        lambda: torch.zeros(LARGE), set_kept(lambda n: torch.full((LARGE,), n + 1.0)), written
    ),
    "grows a list": Told(list, on_kept(lambda kept, n: kept.append(n)), the_sum),
    "grows a list, as passes do": Told(list, on_kept(lambda kept, n: kept.append(n)), grown),
    "brings tensors that passes write": Told(
        list, on_kept(lambda kept, n: kept.append(torch.full((3,), n + 1.0))), written_last
    ),
    "brings large tensors that passes write": Told(
        list, on_kept(lambda kept, n: kept.append(torch.full((LARGE,), n + 1.0))), written_last
    ),
    "brings objects that passes count in": Told(list, on_kept(lambda kept, n: kept.append(Holder())), counted_last),
    "fills a dict": Told(
        dict, on_kept(lambda kept, n: kept.update({n: n})), lambda model, _: float(sum(model.kept.values()))
    ),
    "fills a dict, as passes do": Told(dict, on_kept(lambda kept, n: kept.update({n: n})), grown_dict),
    "exchanges a dict that passes fill": Told(dict, set_kept(lambda n: {"sum": float(n)}), grown_dict),
    "turns a deque": Told(
        lambda: deque([1.0, 2.0, 4.0]), on_kept(lambda kept, n: kept.rotate()), lambda model, _: model.kept[0]
    ),
    "writes an array of numpy": Told(
        lambda: numpy.zeros(WIDTH, numpy.float32),
        on_kept(lambda kept, n: kept.__iadd__(n + 1)),
        lambda model, _: float(model.kept.mean()),
    ),
    "writes an array of numpy, as passes do": Told(
        lambda: numpy.zeros(WIDTH, numpy.float32), on_kept(lambda kept, n: kept.__iadd__(n + 1)), numpy_written
    ),
    "writes a large array of numpy, as passes do": Told(
        lambda: numpy.zeros(LARGE, numpy.float32), on_kept(lambda kept, n: kept.__iadd__(n + 1)), numpy_written
    ),
    "exchanges an array of numpy that passes write": Told(
        lambda: numpy.zeros(WIDTH, numpy.float32),
        set_kept(lambda n: numpy.full(WIDTH, n + 1, numpy.float32)),
        numpy_written,
    ),
    "seeds a torch.Generator": Told(torch.Generator, on_kept(lambda kept, n: kept.manual_seed(n)), noise),
    "draws from a torch.Generator": Told(
        lambda: torch.Generator().manual_seed(1), on_kept(lambda kept, n: torch.rand(n + 1, generator=kept)), noise
    ),
    "exchanges a torch.Generator": Told(torch.Generator, set_kept(lambda n: torch.Generator().manual_seed(n)), noise),
    "draws from numpy's Generator": Told(
        lambda: numpy.random.default_rng(1),
        on_kept(lambda kept, n: kept.random(n + 1)),
        lambda model, _: model.kept.random(),
    ),
    "draws from random.Random": Told(
        lambda: random.Random(1), on_kept(lambda kept, n: kept.random()), lambda model, _: model.kept.random()
    ),
    "changes an object that passes change": Told(
        Holder, on_kept(lambda kept, n: setattr(kept, "count", kept.count + 1)), counted_item
    ),
}
"""Changes that a loop makes to a piece of the model's state."""


def told(one: Told, window: int) -> Training:
    training = trained(Hearing(one))
    training.between = partial(one.told, training.model)
    return training.in_windows(window)


def with_loop(
    model: nn.Module, between: Callable[[Training, int], object], window: int = 0, **options: Any
) -> Training:
    training = trained(model, **options)
    training = training.in_windows(window)
    training.between = partial(between, training)
    return training


def seeded(_: Training, number: int) -> None:
    torch.manual_seed(number)


def all_seeded(_: Training, number: int) -> None:
    torch.manual_seed(number), random.seed(number), numpy.random.seed(number)


def rates_set(training: Training, number: int) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)


def parts_frozen(training: Training, number: int) -> None:
    training.model.e.requires_grad_(number % 2 == 1)


def modes_switched(training: Training, number: int) -> None:
    training.model.train(number % 2 == 0)


def weights_loaded(training: Training, number: int) -> None:
    """Reload saved weights and optimizer states."""
    saved = training.kept.setdefault("saved", [])
    if number == 1:
        saved += [copy.deepcopy(one.state_dict()) for one in (training.model, training.optimizer)]
    elif number == 2:
        for one, state in zip((training.model, training.optimizer), saved, strict=True):
            one.load_state_dict(copy.deepcopy(state))


def weights_moved(training: Training, _: int) -> None:
    with torch.no_grad():
        training.model.b.weight.mul_(0.99)


def group_added(training: Training, number: int) -> None:
    if number == 2:
        training.optimizer.add_param_group({"params": [training.kept["scale"]], "lr": 0.1})


def module_exchanged(training: Training, number: int) -> None:
    """Replace a module by a copy with the same weights and separate BatchNorm statistics."""
    training.model[3] = copy.copy(training.model[3])
    training.model[3]._buffers = {name: one.clone() for name, one in training.model[3]._buffers.items()}


def module_brought(training: Training, number: int) -> None:
    if number == 1:
        training.model.insert(3, nn.BatchNorm1d(WIDTH, affine=False))


def schedule_of_loop(training: Training, number: int) -> None:
    if number:
        training.kept["schedule of the loop"].step()


def scheduled_outside(window: int) -> Training:
    training = with_loop(Net(), schedule_of_loop, window)
    training.kept["schedule of the loop"] = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    return training


def grouped_later() -> Training:
    scale = nn.Parameter(torch.ones(()))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["x"]) * scale, batch["y"])

    return with_loop(Net(), group_added, loss=loss, kept={"scale": scale})


def averaged_by_loop(window: int = 0) -> Training:
    """Build a training with a teacher whose weights the loop updates in place."""
    model = Net()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        return functional.cross_entropy(out, batch["y"]) + functional.mse_loss(out, teacher(batch["x"]))

    @torch.no_grad()
    def between(training: Training, _: int) -> None:
        for slow, fast in zip(teacher.parameters(), training.model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    return with_loop(model, between, window, loss=loss, kept={"teacher": teacher})


def extra_of_loop(window: int) -> Training:
    """Build a training with state that is passed by name and that the loop changes as well."""
    held = Holder()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        held.items.append(held.count)
        return classified(model, batch) * (1 + 0.01 * sum(held.items))

    def between(_: Training, number: int) -> None:
        held.count = number

    return with_loop(Net(), between, window, loss=loss, kept={"held": held}, extra_state=[held])


LOOPS: dict[str, Callable[[int], Training]] = {
    "seeds every batch": lambda window: with_loop(mlp(nn.ReLU(), nn.Dropout(0.2)), seeded, window),
    "sets the rate": lambda window: with_loop(Net(), rates_set, window),
    "steps a schedule": scheduled_outside,
    "freezes and unfreezes": lambda window: with_loop(Net(), parts_frozen, window),
    "switches modes": lambda window: with_loop(mlp(nn.BatchNorm1d(WIDTH)), modes_switched, window),
    "loads weights and states": lambda window: with_loop(Net(), weights_loaded, window),
    "moves weights in place": lambda window: with_loop(Net(), weights_moved, window),
    "exchanges a module": lambda window: with_loop(
        mlp(nn.BatchNorm1d(WIDTH)), module_exchanged, window, recut_batch_norm=True
    ),
    "adds a module": lambda window: with_loop(mlp(), module_brought, window, recut_batch_norm=True),
    "averages the weights of a teacher": averaged_by_loop,
    "changes extra_state": extra_of_loop,
}


# -- several updates ---------------------------------------------------------------------------------------------------


class Adversaries(nn.Module):
    """A generator of outputs and a discriminator against one-hot labels, each with a separate optimizer."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.made, self.told = Net(), nn.Sequential(nn.Linear(CLASSES, WIDTH), between, nn.Linear(WIDTH, 2))


def told_apart(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        made = model.made(batch["x"]).softmax(1)
    real = functional.one_hot(batch["y"], CLASSES).float()
    labels = torch.ones_like(batch["y"])
    return functional.cross_entropy(model.told(real), labels) + functional.cross_entropy(model.told(made), 1 - labels)


def deceiving(model: Any, batch: Any) -> Tensor:
    made = model.told(model.made(batch["x"]).softmax(1))
    return functional.cross_entropy(made, torch.ones_like(batch["y"]))


def adversaries(between: Callable[[], nn.Module], **options: Any) -> Training:
    """Build a GAN training with two updates in turn; each leaves gradients in the other network."""
    model = Adversaries(between())
    generator = torch.optim.Adam(model.made.parameters(), lr=0.01, betas=(0.5, 0.9))
    return Training(
        model, adamw(model.told.parameters()), told_apart, options=options, others=[Turn(generator, deceiving)],
        steps=(2, 3),
    )  # fmt: skip


def alternating() -> Training:
    """Build a training with two optimizers of the same parameters in turn; both losses read one counter."""
    model, held = Net(), {"calls": 0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        held["calls"] += 1
        return classified(model, batch) * (1 + 0.01 * held["calls"])

    def other(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) + model(batch["x"]).square().mean()

    slow = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Training(model, adamw(model.parameters()), loss, kept=held, others=[Turn(slow, other)], steps=(2, 3))


def inner_optimizer() -> Training:
    """Build a training whose loss first trains a critic with a separate optimizer, and then uses it."""
    critic = nn.Linear(CLASSES, CLASSES)
    inner = adamw(critic.parameters())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        inner.zero_grad()
        functional.cross_entropy(critic(out.detach()), batch["y"]).backward()
        inner.step()
        critic.requires_grad_(False)
        value = functional.cross_entropy(out + critic(out), batch["y"])
        critic.requires_grad_(True)
        return value

    return trained(Net(), loss, kept={"critic": critic, "inner": inner}, recut_loss=True)


def inner_sgd() -> Training:
    """Build the same training with momentum and a schedule in the inner optimizer."""
    critic = nn.Linear(CLASSES, CLASSES)
    inner = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        gradients = torch.autograd.grad(functional.cross_entropy(critic(out.detach()), batch["y"]), critic.parameters())
        for parameter, gradient in zip(critic.parameters(), gradients, strict=True):
            parameter.grad = gradient
        inner.step()
        schedule.step()
        with torch.no_grad():
            wanted = critic(out)
        return functional.cross_entropy(out, batch["y"]) + functional.mse_loss(out, wanted)

    return trained(Net(), loss, kept={"critic": critic, "inner": inner, "schedule": schedule}, recut_loss=True)


SEVERAL: dict[str, Callable[[], Training]] = {
    "two updates in turn (GAN)": lambda: adversaries(nn.Tanh),
    "two updates in turn, BatchNorm": lambda: adversaries(partial(nn.BatchNorm1d, WIDTH), recut_batch_norm=True),
    "two optimizers of one model": alternating,
    "an optimizer in the loss": inner_optimizer,
    "an optimizer and its schedule in the loss": inner_sgd,
}


OTHERS = (_storm_states, _storm_kept, _storm_losses, _storm_recipes)
"""Groups of which some kinds are repeated with windows."""


def in_windows(kind: Kind) -> Kind:
    """Return a training of another group with two batches per update.

    Each batch is seeded. Otherwise, when both batches are repeated with smaller micro-batches, the second would
    continue from the random state that the first batch's micro-batches left.
    """

    def make() -> Training:
        training = kind.make().in_windows(WINDOW)
        training.between = partial(all_seeded, training)
        return training

    return Kind("windows", kind.name, make)


def kinds() -> list[Kind]:
    """Return the kinds that run in a `plimsoll.TrainStep`, also with windows of two batches."""
    found = []
    for group, window in (("state of the loop", 0), ("state of the loop, windows", WINDOW)):
        found += [Kind(group, name, partial(told, one, window)) for name, one in TOLD.items()]
        found += [Kind(group, name, partial(make, window)) for name, make in LOOPS.items()]
    found.append(Kind("state of the loop", "adds a group of parameters", grouped_later))
    found += [Kind("several optimizers", name, make) for name, make in SEVERAL.items()]
    return [
        *found,
        *(in_windows(kind) for module in OTHERS for kind in module.kinds()[::2] if "vectors" not in kind.name),
    ]
