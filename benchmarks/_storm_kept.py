"""Models of `storm.py` that keep state in Python when they are called: attributes, containers, generators."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn

from _storm_models import CLASSES, WIDTH, Net, trained
from _storm_run import Kind, Training


class Keeping(Net):
    """A net with an attribute and a function that uses it in each pass and returns the scale of the output."""

    def __init__(self, kept: Callable[[], Any], change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.kept, self.change = kept(), change

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.b(h) * (1 + 0.01 * self.change(self, h.detach()))


@dataclass
class Statistics:
    count: int = 0
    seen: list[float] = field(default_factory=list)


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def add_one(net: Any, _: Tensor) -> int:
    net.kept += 1
    return net.kept


def keep_state(net: Any, h: Tensor) -> Any:
    held, net.kept = net.kept, h.mean()
    return held


def append(net: Any, h: Tensor) -> float:
    net.kept.append(float(h.mean()))
    return sum(net.kept)


def append_tensor(net: Any, h: Tensor) -> Tensor:
    net.kept.append(h.mean(0))
    return torch.stack(list(net.kept)).mean()


def add_to_dict(net: Any, h: Tensor) -> float:
    net.kept["sum"] += float(h.mean())
    net.kept["calls"] += 1
    return net.kept["sum"] / net.kept["calls"]


def add_inside(net: Any, h: Tensor) -> float:
    net.kept["of"][0]["h"] += h.mean()
    return float(net.kept["of"][0]["h"])


def add_to_set(net: Any, h: Tensor) -> int:
    net.kept.add(round(float(h.sum()), 3))
    return len(net.kept)


def add_to_array(net: Any, h: Tensor) -> float:
    net.kept[:WIDTH] += h.mean(0).numpy()
    return float(net.kept.mean())


def count_in_object(net: Any, h: Tensor) -> int:
    net.kept.count += 1
    if isinstance(net.kept, Statistics):
        net.kept.seen.append(float(h.mean()))
    return net.kept.count


def in_two_steps(net: Any, h: Tensor) -> float:
    """Implement a curriculum: the behaviour changes in the third call."""
    net.kept["calls"] += 1
    if net.kept["calls"] > 2:
        net.kept["late"].append(h.mean(0))
    return len(net.kept["late"])


def take_next(net: Any, _: Tensor) -> int:
    return next(net.kept)


class Ticks:
    """An iterator over numbers with ``state_dict``: it can be set back to a saved position."""

    def __init__(self) -> None:
        self.load_state_dict({"taken": 0})

    def __next__(self) -> int:
        self.taken += 1
        return next(self.numbers)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]
        self.numbers = iter(range(self.taken, 1000))


def given_by_name() -> Training:
    net = Keeping(Ticks, take_next)
    return trained(net, extra_state=[net.kept])


def every_number():
    number = 0
    while True:
        yield (number := number + 1)


def drawn(net: Any, h: Tensor) -> Any:
    generator = net.kept
    if isinstance(generator, torch.Generator):
        return torch.rand(len(h), CLASSES, generator=generator)
    return float(generator.random())


def drawn_globally(_: Any, h: Tensor) -> Any:
    return torch.rand(len(h), CLASSES) + float(numpy.random.random()) + random.random()


KEEPING: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "counter in an attribute": (int, add_one),
    "hidden state in an attribute": (lambda: torch.zeros(()), keep_state),
    "list of numbers": (list, append),
    "list of tensors": (list, append_tensor),
    "deque of the last numbers": (lambda: deque(maxlen=3), append),
    "deque of the last tensors": (lambda: deque(maxlen=2), append_tensor),
    "dict of sums": (lambda: {"sum": 0.0, "calls": 0}, add_to_dict),
    "defaultdict of sums": (lambda: defaultdict(float), add_to_dict),
    "tensor in a dict in a list in a dict": (lambda: {"of": [{"h": torch.zeros(())}]}, add_inside),
    "set of what was seen": (set, add_to_set),
    "numpy array": (lambda: numpy.zeros(WIDTH, dtype=numpy.float32), add_to_array),
    "large numpy array": (lambda: numpy.zeros(400_000, dtype=numpy.float32), add_to_array),
    "dataclass": (Statistics, count_in_object),
    "object with slots": (Slotted, count_in_object),
    "curriculum that changes later": (lambda: {"calls": 0, "late": []}, in_two_steps),
    "iterator of Python": (lambda: iter(range(1000)), take_next),
    "generator function": (every_number, take_next),
    "torch.Generator": (lambda: torch.Generator().manual_seed(1), drawn),
    "numpy's Generator": (lambda: numpy.random.default_rng(1), drawn),
    "numpy's RandomState": (lambda: numpy.random.RandomState(1), drawn),
    "random.Random": (lambda: random.Random(1), drawn),
    "all global random numbers": (int, drawn_globally),
}


class OfClass(Net):
    """A net with a counter in a class attribute."""

    calls: ClassVar[list[int]] = [0]

    def forward(self, x: Tensor) -> Tensor:
        OfClass.calls[0] += 1
        return super().forward(x) * (1 + 0.01 * OfClass.calls[0])


CALLS = 0


class OfModule(Net):
    """A net with a counter in a global of the module."""

    def forward(self, x: Tensor) -> Tensor:
        global CALLS  # noqa: PLW0603 - what the kind is about
        CALLS += 1
        return super().forward(x) * (1 + 0.01 * CALLS)


class Carried(Net):
    """A recurrent net that starts with the state of the previous batch, sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.r, self.state = nn.GRU(WIDTH, WIDTH, batch_first=True), None

    def features(self, x: Tensor) -> Tensor:
        state = self.state if self.state is not None and self.state.shape[1] == len(x) else None
        out, state = self.r(self.e(x), state)
        self.state = state.detach()
        return out.mean(1)


def of_class() -> Training:
    OfClass.calls[0] = 0
    return trained(OfClass(), kept={"calls": OfClass.calls})


class Global:
    """A holder that makes the global visible to the comparison."""

    def __init__(self) -> None:
        global CALLS  # noqa: PLW0603 - what the kind is about
        CALLS = 0

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"CALLS": CALLS}


def kinds() -> list[Kind]:
    """Return all kinds of this module, with AdamW."""
    found = [Kind("state in Python", name, partial(_of, *made)) for name, made in KEEPING.items()]
    others = {
        "iterator given as extra_state": given_by_name,
        "counter of a class": of_class,
        "counter in a global": lambda: trained(OfModule(), kept={"globals": Global()}),
        "GRU that carries its state": lambda: trained(Carried()),
    }
    return [*found, *(Kind("state in Python", name, make) for name, make in others.items())]


def _of(kept: Callable[[], Any], change: Callable[[Any, Tensor], Any]) -> Training:
    return trained(Keeping(kept, change))
