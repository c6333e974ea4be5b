"""Losses and hooks of `storm.py` with state: in modules, closures, objects and averages of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from _storm_models import CLASSES, WIDTH, Net, adamw, classified, mlp, trained
from _storm_run import Kind, Training

# -- losses ------------------------------------------------------------------------------------------------------------


def centred() -> Training:
    """Build a training with DINO's centre: buffers of a module outside the model."""
    centre = nn.BatchNorm1d(CLASSES, affine=False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        value = functional.cross_entropy(out - centre.running_mean, batch["y"])
        centre(out.detach())
        return value

    return trained(Net(), loss, kept={"centre": centre})


class Running(nn.Module):
    """A loss module that divides by a running mean of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        value = classified(model, batch)
        self.mean.lerp_(value.detach(), 0.1)
        return value / self.mean


class Scaled:
    """A loss object with numeric attributes."""

    def __init__(self) -> None:
        self.scale, self.seen = 1.0, []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        value = classified(model, batch) * self.scale
        self.scale *= 1.01
        self.seen.append(float(value.detach()))
        return value

    def bound(self, model: nn.Module, batch: Any) -> Tensor:
        return self(model, batch)


def of_object() -> Training:
    loss = Scaled()
    return trained(Net(), loss, kept={"loss": loss})


def of_method() -> Training:
    loss = Scaled()
    return trained(Net(), loss.bound, kept={"loss": loss})


def of_module() -> Training:
    loss = Running()
    return trained(Net(), loss, kept={"loss": loss})


def closing_over(kept: Any, weigh: Callable[[Any, Tensor], Any]) -> Training:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        return functional.cross_entropy(out, batch["y"]) * weigh(kept, out.detach())

    return trained(Net(), loss, kept={"kept": kept})


def add_to_tensor(kept: Tensor, out: Tensor) -> Tensor:
    kept.add_(out.mean(0))
    return 1 + 0.01 * kept.mean()


def add_to_tensor_of_numpy(kept: Any, out: Tensor) -> float:
    kept += out.mean(0).numpy()
    return 1 + 0.01 * float(kept.mean())


def add_to_dict(kept: dict[str, Any], out: Tensor) -> float:
    kept["calls"] = kept.get("calls", 0) + 1
    kept.setdefault("outputs", []).append(float(out.mean()))
    return 1 + 0.01 * kept["calls"]


def noise(kept: torch.Generator, out: Tensor) -> Tensor:
    return 1 + 0.1 * torch.rand((), generator=kept)


def numpy_noise(kept: Any, _: Tensor) -> float:
    return 1 + 0.1 * float(kept.random())


def counting_nonlocal() -> Training:
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return classified(model, batch) * (1 + 0.01 * calls)

    class Shown:
        @property
        def __dict__(self) -> dict[str, Any]:
            return {"calls": calls}

    return trained(Net(), loss, kept={"calls": Shown()})


def of_partial() -> Training:
    kept: dict[str, Any] = {}

    def loss(kept: dict[str, Any], model: nn.Module, batch: Any) -> Tensor:
        return classified(model, batch) * add_to_dict(kept, batch["x"].float())

    return trained(Net(), partial(loss, kept), kept={"kept": kept})


def of_function() -> Training:
    """Build a training with a counter in an attribute of the loss function."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        loss.calls += 1
        return classified(model, batch) * (1 + 0.01 * loss.calls)

    loss.calls = 0
    return trained(Net(), loss, kept={"loss": vars(loss)})


def uncertain() -> Training:
    """Build a training with two loss weights that are trained in addition to the model."""
    weights = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])
    model = Net()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        both = functional.cross_entropy(out, batch["y"]), out.pow(2).mean()
        return sum((-w).exp() * one + w for w, one in zip(weights, both, strict=True))

    optimizer = adamw([*model.parameters(), *weights.parameters()])
    return Training(model, optimizer, loss, kept={"weights": weights})


def masked_in_place() -> Training:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        labels = batch["x"][:, 0] % CLASSES
        batch["x"][:, 0] = 0
        return functional.cross_entropy(model(batch["x"]), labels)

    return trained(Net(), loss)


def labels_changed() -> Training:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch["y"].data.add_(1).remainder_(CLASSES)
        return classified(model, batch)

    return trained(Net(), loss)


def distilled() -> Training:
    """Build a training with a teacher in the closure: an average of the student's weights that the loss updates."""
    model = Net()
    teacher = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        teacher.update_parameters(model)
        out = model(batch["x"])
        with torch.no_grad():
            wanted = teacher(batch["x"])
        return functional.mse_loss(out, wanted) + functional.cross_entropy(out, batch["y"])

    return Training(model, adamw(model.parameters()), loss, kept={"teacher": teacher})


def contrastive() -> Training:
    """Build a training with a loss that compares the samples of a batch, which must not be split."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = functional.normalize(model(batch["x"]), dim=1)
        return functional.cross_entropy(out @ out.T / 0.5, torch.arange(len(out)))

    return trained(mlp(nn.Tanh()), loss)


class Counting(torch.autograd.Function):
    """A backward pass that counts its calls, like gradient reversal with a schedule."""

    calls: ClassVar[list[int]] = [0]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Counting.calls[0] += 1
        return gradient * (1 + 0.01 * Counting.calls[0])


def counting_backward() -> Training:
    Counting.calls[0] = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(Counting.apply(model(batch["x"])), batch["y"])

    return trained(Net(), loss, kept={"calls": Counting.calls})


# -- hooks -------------------------------------------------------------------------------------------------------------


def hooked(register: Callable[[nn.Module, list[int], Tensor], Any]) -> Training:
    """Build a training with a list and a tensor that a hook of the model changes."""
    model, calls, total = Net(), [0], torch.zeros(WIDTH)
    register(model, calls, total)
    return trained(model, kept={"calls": calls, "total": total})


def forward_hook(model: Any, calls: list[int], total: Tensor) -> None:
    def hook(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        total.lerp_(inputs[0].detach().mean(0), 0.1)
        return output * (1 + 0.01 * calls[0])

    model.b.register_forward_hook(hook)


def forward_pre_hook(model: Any, calls: list[int], total: Tensor) -> None:
    def hook(_: nn.Module, inputs: Any) -> Any:
        calls[0] += 1
        total.add_(inputs[0].detach().mean(0))
        return (inputs[0] + 0.1 * total,)

    model.b.register_forward_pre_hook(hook)


def backward_hook(model: Any, calls: list[int], total: Tensor) -> None:
    def hook(_: nn.Module, inputs: Any, __: Any) -> Any:
        calls[0] += 1
        total.add_(inputs[0].mean(0))
        return (inputs[0] * (1 + 0.01 * calls[0]),)

    model.b.register_full_backward_hook(hook)


def tensor_hook(model: Any, calls: list[int], total: Tensor) -> None:
    def hook(gradient: Tensor) -> Tensor:
        calls[0] += 1
        total.add_(gradient.mean(0))
        return gradient * (1 + 0.01 * calls[0])

    model.b.weight.register_hook(hook)


def accumulated_hook(model: Any, calls: list[int], total: Tensor) -> None:
    def hook(parameter: Tensor) -> None:
        calls[0] += 1
        total.add_(parameter.grad.mean(0))

    model.b.weight.register_post_accumulate_grad_hook(hook)


def attribute_of_parameter(model: Any, calls: list[int], _: Tensor) -> None:
    model.b.weight.num_gradients = 0

    def hook(parameter: Any) -> None:
        calls[0] += 1
        parameter.num_gradients += 1

    model.b.weight.register_post_accumulate_grad_hook(hook)


def with_optimizer_hook(after: bool, make: Callable[[Training], Callable[..., None]]) -> Training:
    training = trained(Net())
    hook = make(training)
    optimizer = training.optimizer
    optimizer.register_step_post_hook(hook) if after else optimizer.register_step_pre_hook(hook)
    return training


def ema(training: Training) -> Callable[..., None]:
    held = training.kept["ema"] = [parameter.detach().clone() for parameter in training.model.parameters()]

    @torch.no_grad()
    def hook(*_: Any) -> None:
        for slow, fast in zip(held, training.model.parameters(), strict=True):
            slow.mul_(0.9).add_(fast.detach() * 0.1)

    return hook


def averaged_model(training: Training) -> Callable[..., None]:
    held = training.kept["averaged"] = AveragedModel(training.model)
    return lambda *_: held.update_parameters(training.model)


def counts(training: Training) -> Callable[..., None]:
    seen = training.kept["seen"] = {"steps": 0, "norms": []}

    def hook(*_: Any) -> None:
        seen["steps"] += 1
        seen["norms"].append(float(torch.stack([one.norm() for one in training.model.parameters()]).sum()))

    return hook


def noisy_gradients(training: Training) -> Callable[..., None]:
    generator = training.kept["generator"] = torch.Generator().manual_seed(3)

    def hook(*_: Any) -> None:
        for parameter in training.model.parameters():
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=generator)

    return hook


def weights_after(training: Training) -> Callable[..., None]:
    @torch.no_grad()
    def hook(*_: Any) -> None:
        weight = training.model.b.weight
        weight.copy_(weight / weight.norm(dim=1, keepdim=True))

    return hook


LOSSES: dict[str, Callable[[], Training]] = {
    "buffers of a loss module": centred,
    "loss module divided by its mean": of_module,
    "loss object with a scale": of_object,
    "bound method of a loss object": of_method,
    "tensor in the closure": lambda: closing_over(torch.zeros(CLASSES), add_to_tensor),
    "numpy array in the closure": lambda: closing_over(numpy.zeros(CLASSES, numpy.float32), add_to_tensor_of_numpy),
    "dict in the closure": lambda: closing_over({}, add_to_dict),
    "torch.Generator in the closure": lambda: closing_over(torch.Generator().manual_seed(2), noise),
    "numpy's Generator in the closure": lambda: closing_over(numpy.random.default_rng(2), numpy_noise),
    "counter that is nonlocal": counting_nonlocal,
    "dict in a partial": of_partial,
    "attribute of the loss function": of_function,
    "trained weights of two losses": uncertain,
    "batch masked in place": masked_in_place,
    "labels changed through .data": labels_changed,
    "averaged teacher in the closure": distilled,
    "loss that compares samples": contrastive,
    "counter in a backward of one's own": counting_backward,
}
HOOKS: dict[str, Callable[[], Training]] = {
    "forward hook": partial(hooked, forward_hook),
    "forward pre-hook": partial(hooked, forward_pre_hook),
    "full backward hook": partial(hooked, backward_hook),
    "hook of a tensor": partial(hooked, tensor_hook),
    "post-accumulate hook": partial(hooked, accumulated_hook),
    "attribute of a parameter": partial(hooked, attribute_of_parameter),
    "average of weights after the update": partial(with_optimizer_hook, True, ema),
    "AveragedModel after the update": partial(with_optimizer_hook, True, averaged_model),
    "numbers noted after the update": partial(with_optimizer_hook, True, counts),
    "numbers noted before the update": partial(with_optimizer_hook, False, counts),
    "noise on gradients before the update": partial(with_optimizer_hook, False, noisy_gradients),
    "weights normalised after the update": partial(with_optimizer_hook, True, weights_after),
}


def kinds() -> list[Kind]:
    """Return all kinds of this module, with AdamW."""
    losses = [Kind("state of the loss", name, make) for name, make in LOSSES.items()]
    return [*losses, *(Kind("hooks", name, make) for name, make in HOOKS.items())]
