"""Optimizers of `storm.py`: all of torch, and others that store their state in the ways of third-party optimizers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn, optim

from _storm_models import CLASSES, VOCABULARY, WIDTH, Net, classified, mlp, trained
from _storm_run import Kind, Training

OF_TORCH: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD, momentum, dampening": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD, nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, nesterov, foreach": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, weight decay, foreach": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "SGD, maximize": partial(optim.SGD, lr=0.01, maximize=True),
    "SGD, fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=0.01),
    "Adam, weight decay, amsgrad": partial(optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
    "Adam, foreach": partial(optim.Adam, lr=0.01, foreach=True),
    "Adam, rate in a tensor": lambda parameters: optim.Adam(parameters, lr=torch.tensor(0.01)),
    "AdamW, foreach, amsgrad": partial(optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "AdamW, fused": partial(optim.AdamW, lr=0.01, fused=True),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.1),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "Adamax, foreach": partial(optim.Adamax, lr=0.01, foreach=True),
    "ASGD": partial(optim.ASGD, lr=0.05),
    "NAdam, foreach": partial(optim.NAdam, lr=0.01, foreach=True),
    "RAdam, foreach": partial(optim.RAdam, lr=0.01, foreach=True),
    "RMSprop, centred, momentum": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "RMSprop, foreach": partial(optim.RMSprop, lr=0.01, foreach=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "Rprop, foreach": partial(optim.Rprop, lr=0.01, foreach=True),
}


class Own(optim.Optimizer):
    """Base class that moves each parameter along a direction; subclasses differ in the state of the direction."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1, **settings: Any) -> None:
        super().__init__(parameters, {"lr": lr, **settings})

    def begin(self, group: dict[str, Any]) -> None:
        """Initialize a group; called once per group."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p, group) * group["lr"])


class NestedDict(Own):
    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        nested = self.state[p].setdefault("of", {"m": torch.zeros_like(p), "t": 0})
        nested["t"] += 1
        return nested["m"].mul_(0.9).add_(p.grad) / nested["t"]


class History(Own):
    """The last gradients in a deque (L-BFGS, Anderson)."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        held = self.state[p].setdefault("held", deque(maxlen=2))
        held.append(p.grad.clone())
        return sum(held) / len(held)


class Matrices(Own):
    """Statistics per dimension in a list (Shampoo, SOAP)."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        sums = self.state[p].setdefault("sums", [torch.zeros(size) for size in p.shape])
        direction = p.grad.clone()
        for dimension, total in enumerate(sums):
            others = [one for one in range(p.dim()) if one != dimension]
            total.add_(p.grad.square().sum(others) if others else p.grad.square())
            shape = [-1 if one == dimension else 1 for one in range(p.dim())]
            direction /= (total.view(shape) + 1e-3).pow(0.5 / p.dim())
        return 0.1 * direction


class InNumpy(Own):
    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        held = self.state[p].setdefault("m", numpy.zeros(tuple(p.shape), numpy.float32))
        held *= 0.9
        held += p.grad.numpy()
        return torch.from_numpy(held.copy())


class Quantized(Own):
    """Eight-bit momentum with a scale, replaced in each step (low-bit optimizers)."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        held = state["q"].float() * state["scale"] if "q" in state else torch.zeros_like(p)
        momentum = 0.9 * held + p.grad
        state["scale"] = momentum.abs().amax().clamp(min=1e-12) / 127
        state["q"] = (momentum / state["scale"]).round().to(torch.int8)
        return momentum


class GroupTensor(Own):
    """A tensor in the group that holds one number (Prodigy, D-Adaptation)."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, d=torch.tensor(1.0))

    def begin(self, group: dict[str, Any]) -> None:
        group["d"].mul_(1.1)

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * group["d"]


class GroupSum(Own):
    """A sum over all parameters of the group, stored in the group (Prodigy)."""

    def begin(self, group: dict[str, Any]) -> None:
        norms = [p.grad.norm() for p in group["params"] if p.grad is not None]
        group.setdefault("norms", []).append(float(torch.stack(norms).norm()) if norms else 0.0)

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / (1 + group["norms"][-1])


class Counter(Own):
    """A counter and an average in attributes of the optimizer."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters)
        self.t, self.mean = 0, torch.zeros(())

    def begin(self, group: dict[str, Any]) -> None:
        self.t += 1

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        self.mean.lerp_(p.grad.mean(), 0.1)
        return (p.grad - self.mean) / (1 - 0.9**self.t)


class OtherKeys(Own):
    """State under keys that are not parameters (schedule-free, wrappers)."""

    def begin(self, group: dict[str, Any]) -> None:
        shared = self.state["shared"]
        shared["t"] = shared.get("t", 0) + 1
        shared.setdefault("sum", torch.zeros(())).add_(1.0)

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / self.state["shared"]["sum"].sqrt()


class CoupledDecay(Own):
    """Weight decay and centralisation, both in place in the gradient (Ranger)."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        p.grad.add_(p, alpha=0.01)
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(1, keepdim=True))
        return p.grad


class ExchangedGradient(Own):
    """A gradient that is replaced (clipping inside the optimizer)."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        p.grad = p.grad / (1 + p.grad.norm())
        return p.grad


class Lookahead(Own):
    """Slow weights of all parameters, synchronised every second step, also without a gradient."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, n=0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["n"] += 1
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone())
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"])
            for p in group["params"] if group["n"] % 2 == 0 else ():
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class Lamb(Own):
    """A learning rate per layer from the norm of the weights (LAMB, LARS)."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        state["m"].lerp_(p.grad, 0.1)
        state["v"].lerp_(p.grad.square(), 0.01)
        update = state["m"] / (state["v"].sqrt() + 1e-3)
        return 0.1 * update * p.norm() / (update.norm() + 1e-6)


class Lion(Own):
    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        held = self.state[p].setdefault("m", torch.zeros_like(p))
        update = held.mul(0.9).add_(p.grad, alpha=0.1).sign_()
        held.mul_(0.99).add_(p.grad, alpha=0.01)
        return 0.1 * update


class Noisy(Own):
    """Langevin dynamics with a separate random generator."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(5)

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad + 0.01 * torch.randn(p.shape, generator=self.generator)


class ByIndex(Own):
    """A schedule by the parameter's index in its group (layer-wise rates)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] * 0.9**place)


class Wrapped(Own):
    """An optimizer around another one, with shared groups and states."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        inner = optim.AdamW(parameters, lr=0.01)
        super().__init__(inner.param_groups)
        self.inner, self.averages = inner, {}
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.inner.step()
        for p in (p for group in self.param_groups for p in group["params"]):
            self.averages.setdefault(p, p.detach().clone()).lerp_(p, 0.1)


OWN: dict[str, Callable[..., optim.Optimizer]] = {
    "state in a dict": NestedDict,
    "state in a deque": History,
    "state in a list (Shampoo)": Matrices,
    "state in numpy": InNumpy,
    "state in eight bits, exchanged": Quantized,
    "tensor of the group (Prodigy)": GroupTensor,
    "sum over the group": GroupSum,
    "attributes that count": Counter,
    "state under other keys": OtherKeys,
    "gradients changed in place (Ranger)": CoupledDecay,
    "gradients exchanged": ExchangedGradient,
    "Lookahead": Lookahead,
    "rates by norms (LAMB)": Lamb,
    "Lion": Lion,
    "noise of its own": Noisy,
    "rates by the place in the group": ByIndex,
    "optimizer in an optimizer": Wrapped,
}


class Experts(Net):
    """A net with an expert that gets a gradient every second pass, and a layer that never gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.never = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x)
        return self.expert(out) if self.calls % 2 else out


def in_groups(model: nn.Module, make: Callable[..., optim.Optimizer]) -> Training:
    """Build a training with three parameter groups of different learning rates, one of them empty."""
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.02}, {"params": others, "lr": 0.01}, {"params": [], "lr": 1.0}]
    return Training(model, make(groups), classified)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(VOCABULARY, WIDTH, sparse=True)


def sparse(make: Callable[..., optim.Optimizer]) -> Training:
    model = Sparse()
    model.b.requires_grad_(False)
    return trained(model, optimizer=make)


def muon() -> Training:
    model = mlp(nn.Tanh())
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return Training(model, optim.Muon(matrices, lr=0.02), classified)


def scheduled(make: Callable[[optim.Optimizer], Any], optimizer: Any) -> Training:
    training = trained(Net(), optimizer=optimizer)
    training.options["schedule"] = make(training.optimizer)
    return training


SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "warm-up": lambda one: optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 3)),
    "one cycle, moving the betas": lambda one: optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=10),
    "cosine with restarts": lambda one: optim.lr_scheduler.CosineAnnealingWarmRestarts(one, T_0=2),
    "rates from a tensor": lambda one: optim.lr_scheduler.LambdaLR(
        one, lambda step: float(torch.linspace(1, 0.1, 10)[step].clone())
    ),
    "two in turn": lambda one: optim.lr_scheduler.SequentialLR(
        one, [optim.lr_scheduler.ConstantLR(one, 0.1), optim.lr_scheduler.ExponentialLR(one, 0.9)], [2]
    ),
}


def kinds() -> list[Kind]:
    """Return each optimizer with a small model; third-party ones also with parameters without gradients."""
    adamw = partial(optim.AdamW, lr=0.01)
    found = [
        Kind("optimizers of torch", name, lambda make=make: trained(mlp(nn.Tanh()), optimizer=make))
        for name, make in OF_TORCH.items()
    ]
    found += [
        Kind("optimizers of torch", "Muon", muon),
        Kind("optimizers of torch", "SparseAdam", lambda: sparse(partial(optim.SparseAdam, lr=0.01))),
        Kind("optimizers of torch", "SGD of a sparse gradient", lambda: sparse(partial(optim.SGD, lr=0.1))),
        Kind("optimizers of torch", "Adagrad of a sparse gradient", lambda: sparse(partial(optim.Adagrad, lr=0.1))),
        Kind("optimizers of torch", "AdamW in groups, one empty", lambda: in_groups(Net(), adamw)),
        Kind("optimizers of torch", "AdamW, experts without gradients", lambda: trained(Experts())),
    ]
    for name, make in OWN.items():
        found.append(Kind("other optimizers", name, lambda make=make: trained(mlp(nn.Tanh()), optimizer=make)))
    for name in ("Lookahead", "rates by the place in the group", "sum over the group", "state in a dict"):
        make = OWN[name]
        found.append(Kind("other optimizers", f"{name}, experts", lambda make=make: trained(Experts(), optimizer=make)))
    found.append(Kind("other optimizers", "Lion in groups, one empty", lambda: in_groups(Net(), Lion)))
    found += [Kind("schedules", name, lambda make=make: scheduled(make, adamw)) for name, make in SCHEDULES.items()]
    return found
