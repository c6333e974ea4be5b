"""Models of `storm.py` whose calls change more than gradients, as in real training code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from _storm_models import CLASSES, VOCABULARY, WIDTH, Net, trained
from _storm_run import Kind, Training

KEPT = 0.9
"""The share of an average that remains after each pass."""

# -- other weights -----------------------------------------------------------------------------------------------------


class Teacher(Net):
    """A second head that follows the first (MoCo, BYOL, Mean Teacher), updated before each pass."""

    def __init__(self, move: Callable[[nn.Module, nn.Module], None]) -> None:
        super().__init__()
        self.k = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.move(self.k, self.b)
        h = self.features(x)
        return self.b(h) + 0.1 * self.k(h)


def in_place(k: nn.Module, q: nn.Module) -> None:
    for slow, fast in zip(k.parameters(), q.parameters(), strict=True):
        slow.mul_(KEPT).add_(fast, alpha=1 - KEPT)


def by_foreach(k: nn.Module, q: nn.Module) -> None:
    torch._foreach_lerp_(list(k.parameters()), list(q.parameters()), 1 - KEPT)


def through_data(k: nn.Module, q: nn.Module) -> None:
    for slow, fast in zip(k.parameters(), q.parameters(), strict=True):
        slow.data = slow.data * KEPT + fast.data * (1 - KEPT)


def by_state_dict(k: nn.Module, q: nn.Module) -> None:
    k.load_state_dict({name: KEPT * slow + (1 - KEPT) * q.state_dict()[name] for name, slow in k.state_dict().items()})


class Clamped(Net):
    """Weights clamped before each pass (WGAN)."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Normalised(Net):
    """Rows of the output layer normalised through ``.data``."""

    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data.div_(self.b.weight.data.norm(dim=1, keepdim=True))
        return super().forward(x)


class Bounded(Net):
    """torch's own ``max_norm``: long rows of the table are shortened at lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)


class Unfreezing(Net):
    """A table that is trained from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.e.weight.requires_grad_(self.calls > 1)
        return super().forward(x)


def parametrized(how: Callable[[nn.Module], nn.Module]) -> Net:
    net = Net()
    how(net.b)
    return net


# -- buffers -----------------------------------------------------------------------------------------------------------


class Buffered(Net):
    """A buffer and an operation on it before each pass; the buffer scales the output."""

    def __init__(self, buffer: Callable[[], Tensor], change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("n", buffer())
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        self.change(self, h.detach())
        return self.b(h) * (1 + 0.01 * self.n.real.float().mean())


def counted(net: Any, _: Tensor) -> None:
    net.n += 1


def counted_in_data(net: Any, _: Tensor) -> None:
    net.n.data.add_(1)


def exchanged(net: Any, h: Tensor) -> None:
    net.n = KEPT * net.n + (1 - KEPT) * h.mean(0)


def averaged(net: Any, h: Tensor) -> None:
    net.n.mul_(KEPT).add_(h.mean(0), alpha=1 - KEPT)


def marked(net: Any, h: Tensor) -> None:
    net.n |= h.mean(0) > 0


def resized(net: Any, h: Tensor) -> None:
    net.n.resize_(WIDTH).copy_(h.amax(0))


def set_to(net: Any, h: Tensor) -> None:
    net.n.set_(torch.cat([net.n, h.mean().reshape(1)]))


def as_written(net: Any, h: Tensor) -> None:
    net.n[:2] = h[0, :2]
    net.n[WIDTH // 2 :].fill_(float(h.mean()))


def only_read(_: Any, __: Tensor) -> None:
    pass


def numpy_view(net: Any, h: Tensor) -> None:
    net.n.numpy()[:] += h.mean(0).numpy()


def made_in_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(WIDTH)


BUFFERS: dict[str, tuple[Callable[[], Tensor], Callable[[Any, Tensor], Any]]] = {
    "integer buffer counts": (lambda: torch.zeros(4, dtype=torch.long), counted),
    "integer buffer counts through .data": (lambda: torch.zeros(4, dtype=torch.long), counted_in_data),
    "single number counts": (lambda: torch.tensor(0), counted),
    "buffer of bytes counts": (lambda: torch.zeros(4, dtype=torch.uint8), counted),
    "mask of booleans grows": (lambda: torch.zeros(WIDTH, dtype=torch.bool), marked),
    "average in place": (lambda: torch.zeros(WIDTH), averaged),
    "average in bfloat16": (lambda: torch.zeros(WIDTH, dtype=torch.bfloat16), averaged),
    "complex buffer counts": (lambda: torch.zeros(WIDTH, dtype=torch.complex64), counted),
    "buffer exchanged for another": (lambda: torch.zeros(WIDTH), exchanged),
    "buffer resized (observers)": (lambda: torch.empty(0), resized),
    "buffer set to a longer one": (lambda: torch.zeros(1), set_to),
    "parts of a buffer written": (lambda: torch.zeros(WIDTH), as_written),
    "buffer written by numpy": (lambda: torch.zeros(WIDTH), numpy_view),
    "expanded buffer only read": (lambda: torch.full((1,), 0.5).expand(3), only_read),
    "expanded buffer exchanged": (lambda: torch.full((1,), 0.5).expand(WIDTH), exchanged),
    "buffer made in inference mode": (made_in_inference, only_read),
    "large buffer in place": (lambda: torch.zeros(400_000), lambda net, h: net.n.add_(h.mean())),
    "large integer buffer through .data": (lambda: torch.zeros(200_000, dtype=torch.long), counted_in_data),
}


class Late(Net):
    """A buffer that is created in one of the first calls, as in data-dependent initialisation."""

    def __init__(self, first_call: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.first_call = first_call

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        self.calls += 1
        if self.calls >= self.first_call and not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(WIDTH))
        if hasattr(self, "late"):
            self.late += h.detach().mean(0)
            h = h + self.late
        return self.b(h)


class LateModule(Net):
    """A module that is added in the first call."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.norm(h.detach())
        return self.b(h - self.norm.running_mean)


class Queue(Net):
    """MoCo's queue of features with its pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(32, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        start = int(self.pointer)
        with torch.no_grad():
            self.queue[start : start + len(h)] = h
            self.pointer[0] = (start + len(h)) % 32
        return self.b(h - 0.1 * self.queue.mean(0))


class Bank(Net):
    """A memory bank with one vector per first word."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(VOCABULARY, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        held = self.bank[x[:, 0]].clone()
        self.bank.index_copy_(0, x[:, 0], KEPT * held + (1 - KEPT) * h.detach())
        return self.b(h + held)


class Codebook(Net):
    """A VQ-VAE codebook, whose codes move to the mean of their nearest vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))
        self.register_buffer("sizes", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        with torch.no_grad():
            nearest = nn.functional.one_hot(torch.cdist(h, self.codes).argmin(1), 4).to(h.dtype)
            self.sizes.mul_(KEPT).add_(nearest.sum(0), alpha=1 - KEPT)
            self.codes.lerp_(nearest.T @ h / self.sizes[:, None], 1 - KEPT)
        return self.b(h + (nearest @ self.codes - h).detach())


def kinds() -> list[Kind]:
    """Return all kinds of this module, with AdamW."""
    models: dict[str, Callable[[], nn.Module]] = {
        "teacher in place": partial(Teacher, in_place),
        "teacher by foreach": partial(Teacher, by_foreach),
        "teacher through .data": partial(Teacher, through_data),
        "teacher by load_state_dict": partial(Teacher, by_state_dict),
        "weights clamped in forward": Clamped,
        "weights normalised through .data": Normalised,
        "Embedding(max_norm=)": Bounded,
        "table unfrozen later": Unfreezing,
        "spectral_norm": lambda: parametrized(parametrizations.spectral_norm),
        "spectral_norm by a hook": lambda: parametrized(nn.utils.spectral_norm),
        "weight_norm": lambda: parametrized(parametrizations.weight_norm),
        "buffer that comes in the first pass": partial(Late, 1),
        "buffer that comes later": partial(Late, 3),
        "module that comes in the first pass": LateModule,
        "queue of features": Queue,
        "memory bank": Bank,
        "codebook of a VQ-VAE": Codebook,
        **{name: partial(Buffered, *made) for name, made in BUFFERS.items()},
    }
    return [Kind("state in forward", name, partial(_of, make)) for name, make in models.items()]


def _of(make: Callable[[], nn.Module]) -> Training:
    return trained(make())
