"""Recipes of `storm.py`: methods from papers, in a loss or a forward pass, with the state that each one needs."""

from __future__ import annotations

import bisect
import copy
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from _storm_models import CLASSES, WIDTH, Net, adamw, classified, mlp, trained
from _storm_run import NUM_SAMPLES, NUM_UPDATES, Kind, Training

# -- adversarial training ----------------------------------------------------------------------------------------------


def fast_gradient(exchanges: bool) -> Training:
    """Build an FGM training: the embedding is moved along its gradient for a second pass, and then restored."""

    def loss(model: Any, batch: Any) -> Tensor:
        weight, value = model.e.weight, classified(model, batch)
        (gradient,) = torch.autograd.grad(value, weight, retain_graph=True)
        backup = weight.data.clone()
        weight.data.add_(gradient / (gradient.norm() + 1e-8), alpha=0.1)
        adversarial = classified(model, batch)
        if exchanges:
            weight.data = backup
        else:
            weight.data.copy_(backup)
        return value + adversarial

    return trained(Net(), loss, recut_loss=True)


def backward_inside() -> Training:
    """Build an FGM training in its usual form: the loss function itself runs the backward pass of the first pass."""

    def loss(model: Any, batch: Any) -> Tensor:
        classified(model, batch).backward()
        weight = model.e.weight
        backup = weight.data.clone()
        weight.data.add_(weight.grad / (weight.grad.norm() + 1e-8), alpha=0.1)
        value = classified(model, batch)
        weight.data = backup
        return value

    return trained(Net(), loss)


class ProjectedGradient:
    """PGD with backups of the weights in an object."""

    def __init__(self) -> None:
        self.backup: dict[str, Tensor] = {}

    def attack(self, model: Any, gradient: Tensor) -> None:
        weight = model.e.weight
        self.backup.setdefault("e", weight.data.clone())
        moved = weight.data + 0.1 * gradient / (gradient.norm() + 1e-8) - self.backup["e"]
        weight.data = self.backup["e"] + moved * min(1.0, 0.15 / float(moved.norm() + 1e-8))

    def restore(self, model: Any) -> None:
        model.e.weight.data = self.backup.pop("e")

    def __call__(self, model: Any, batch: Any) -> Tensor:
        for _ in range(2):
            (gradient,) = torch.autograd.grad(classified(model, batch), model.e.weight)
            self.attack(model, gradient)
        value = classified(model, batch)
        self.restore(model)
        return value + classified(model, batch)


def projected_gradient() -> Training:
    loss = ProjectedGradient()
    return trained(Net(), loss, kept={"attack": loss}, recut_loss=True)


def free_perturbation(is_kept: bool) -> Training:
    """Build a FreeLB training: a perturbation of the embeddings with gradients, optionally kept between batches."""
    held = {"delta": torch.zeros(6, WIDTH, requires_grad=True)}

    def loss(model: Any, batch: Any) -> Tensor:
        delta = held["delta"] if is_kept else torch.zeros(6, WIDTH, requires_grad=True)
        for _ in range(2):
            out = model.b((model.e(batch["x"]).detach() + delta).mean(1))
            (gradient,) = torch.autograd.grad(functional.cross_entropy(out, batch["y"]), delta)
            delta.data.add_(0.1 * gradient / (gradient.norm() + 1e-8))
        return functional.cross_entropy(model.b((model.e(batch["x"]) + delta).mean(1)), batch["y"])

    return trained(Net(), loss, kept={"held": held}, recut_loss=True)


def free_adversarial() -> Training:
    """Build a training whose perturbation gets its gradient in the backward pass and is moved in the next pass."""
    delta = torch.zeros(6, WIDTH, requires_grad=True)

    def loss(model: Any, batch: Any) -> Tensor:
        if delta.grad is not None:
            delta.data.add_(delta.grad.sign(), alpha=0.01)
            delta.grad = None
        return functional.cross_entropy(model.b((model.e(batch["x"]) + delta).mean(1)), batch["y"])

    return trained(Net(), loss, kept={"delta": delta})


def vectors_given(are_new: bool) -> Training:
    """Build a training with embeddings in the batch that have gradients, which accumulate if the tensors are reused."""

    def loss(model: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(model.b(batch["v"].mean(1)), batch["y"])

    training = trained(Net(), loss)
    generator = torch.Generator().manual_seed(7)
    vectors = [torch.randn(NUM_SAMPLES, 6, WIDTH, generator=generator).requires_grad_() for _ in range(NUM_UPDATES)]
    if not are_new:
        vectors = [vectors[0], *[vectors[1]] * (NUM_UPDATES - 1)]
    given = zip(training.batches, vectors, strict=True)
    training.batches = [{"v": vector, "y": batch["y"]} for batch, vector in given]
    return training


def virtual_adversarial() -> Training:
    """Build a VAT training: a random direction is turned into the worst one."""

    def loss(model: Any, batch: Any) -> Tensor:
        vectors = model.e(batch["x"])
        with torch.no_grad():
            wanted = model.b(vectors.mean(1)).softmax(1)
        direction = torch.randn_like(vectors)
        for _ in range(2):
            direction = functional.normalize(direction, dim=-1).requires_grad_()
            out = model.b((vectors.detach() + 0.1 * direction).mean(1)).log_softmax(1)
            (direction,) = torch.autograd.grad(functional.kl_div(out, wanted, reduction="batchmean"), direction)
        out = model.b((vectors + functional.normalize(direction, dim=-1)).mean(1)).log_softmax(1)
        return classified(model, batch) + functional.kl_div(out, wanted, reduction="batchmean")

    return trained(Net(), loss)


def sharpness_aware() -> Training:
    """Build a SAM training: the loss moves all weights for the main pass, and a backward hook moves them back."""
    moved: list[Tensor] = []

    def loss(model: Any, batch: Any) -> Tensor:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(classified(model, batch), parameters)
        norm = torch.stack([one.norm() for one in gradients]).norm() + 1e-8
        moved[:] = [0.05 * one / norm for one in gradients]
        with torch.no_grad():
            torch._foreach_add_(parameters, moved)
        value = classified(model, batch)
        with torch.no_grad():
            for parameter, by in zip(parameters, moved, strict=True):
                parameter.data.sub_(by)  # rounding leaves a difference
        return value

    return trained(Net(), loss, kept={"moved": moved}, recut_loss=True)


def noisy_weights() -> Training:
    """Build a training with noise on the weights for one pass; rounding leaves small differences."""

    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            noise = 0.1 * torch.randn_like(self.b.weight)
            self.b.weight.data.add_(noise)
            out = super().forward(x)
            self.b.weight.data.sub_(noise)
            return out

    return trained(Noisy())


# -- averages and memories ---------------------------------------------------------------------------------------------


def mean_teacher() -> Training:
    """Build a training with a mean teacher: a copy whose parameters and buffers the loss updates in place."""
    model = mlp(nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(teacher.state_dict().values(), model.state_dict().values(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
            wanted = teacher(batch["x"])
        out = model(batch["x"])
        return functional.cross_entropy(out, batch["y"]) + functional.mse_loss(out, wanted)

    return trained(model, loss, kept={"teacher": teacher}, recut_batch_norm=True)


def weights_in_dict() -> Training:
    """Build a training with an average of the weights in a dict, which each pass replaces."""
    held = {"average": OrderedDict()}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        now = model.state_dict()
        held["average"] = OrderedDict(
            (name, 0.9 * held["average"].get(name, one) + 0.1 * one) for name, one in now.items()
        )
        out = torch.func.functional_call(model, dict(held["average"]), (batch["x"],))
        return classified(model, batch) + 0.1 * out.square().mean()

    return trained(Net(), loss, kept={"held": held})


def reptile() -> Training:
    """Build a Reptile training: a copy is trained for some steps, and the weights move towards it in place."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1)
        for _ in range(2):
            gradients = torch.autograd.grad(classified(fast, batch), list(fast.parameters()))
            for parameter, gradient in zip(fast.parameters(), gradients, strict=True):
                parameter.grad = gradient
            inner.step()
        with torch.no_grad():
            for slow, moved in zip(model.parameters(), fast.parameters(), strict=True):
                slow.lerp_(moved, 0.1)
        return classified(model, batch)

    return trained(Net(), loss, recut_loss=True)


def meta_learning() -> Training:
    """Build a MAML training: the loss after one step of gradient descent, differentiated through the step."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(classified(model, batch), parameters, create_graph=True)
        moved = {name: one - 0.1 * by for name, one, by in zip(names, parameters, gradients, strict=True)}
        out = torch.func.functional_call(model, moved, (batch["x"],))
        return functional.cross_entropy(out, batch["y"])

    return trained(Net(), loss, recut_loss=True)


def memory_in_deque(**options: Any) -> Training:
    """Build a training with MoCo's queue as a Python deque outside the loss."""
    queue: deque[Tensor] = deque(maxlen=6)

    def loss(model: Any, batch: Any) -> Tensor:
        h = model.features(batch["x"])
        negatives = torch.stack([*queue]) if queue else torch.zeros(1, WIDTH)
        value = functional.cross_entropy(model.b(h), batch["y"]) + 0.1 * (h @ negatives.T).logsumexp(1).mean()
        queue.extend(functional.normalize(h.detach(), dim=1))
        return value

    return trained(Net(), loss, kept={"queue": queue}, **options)


def cross_batch_memory() -> Training:
    """Build an XBM training: a list of tensors with labels, from which the oldest are removed."""
    held: list[tuple[Tensor, Tensor]] = []

    def loss(model: Any, batch: Any) -> Tensor:
        h = model.features(batch["x"])
        if len(held) > 2:
            held.pop(0)
        held.append((h.detach().clone(), batch["y"].clone()))
        others = torch.cat([one for one, _ in held])
        return functional.cross_entropy(model.b(h), batch["y"]) + 0.1 * torch.cdist(h, others).mean()

    return trained(Net(), loss, kept={"held": held}, recut_loss=True)


class Negatives(nn.Module):
    """A loss with buffers for a queue, its pointer and a flag that the queue is full."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", functional.normalize(torch.randn(10, WIDTH), dim=1), persistent=False)
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("is_full", torch.tensor(False))

    def forward(self, model: Any, batch: Any) -> Tensor:
        h = model.features(batch["x"])
        value = functional.cross_entropy(model.b(h), batch["y"]) + 0.1 * (h @ self.queue.clone().T).logsumexp(1).mean()
        with torch.no_grad():
            places = (self.pointer + torch.arange(len(h))) % len(self.queue)
            self.queue[places] = functional.normalize(h, dim=1)
            self.is_full |= self.pointer + len(h) >= len(self.queue)
            self.pointer.copy_((self.pointer + len(h)) % len(self.queue))
        return value * (1 + self.is_full)


def negatives() -> Training:
    loss = Negatives()
    return trained(Net(), loss, kept={"loss": loss})


def centres() -> Training:
    """Build a training with centre loss: one centre per class, updated by hand; a parameter of no optimizer."""
    held = nn.Parameter(torch.zeros(CLASSES, WIDTH))

    def loss(model: Any, batch: Any) -> Tensor:
        h, y = model.features(batch["x"]), batch["y"]
        value = functional.cross_entropy(model.b(h), y) + 0.1 * (h - held[y]).square().sum(1).mean()
        held.data.index_add_(0, y, (h.detach() - held.data[y]) * 0.1)
        return value

    return trained(Net(), loss, kept={"centres": held})


class BatchRenorm(nn.Module):
    """Batch renormalisation: running statistics, and bounds that widen with a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("deviation", torch.ones(WIDTH))
        self.register_buffer("num_batches", torch.tensor(0, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(0), x.std(0, unbiased=False) + 1e-3
        most = min(1 + 0.1 * int(self.num_batches), 3.0)
        r = (deviation.detach() / self.deviation).clamp(1 / most, most)
        d = ((mean.detach() - self.mean) / self.deviation).clamp(-most, most)
        self.mean += 0.1 * (mean.detach() - self.mean)
        self.deviation += 0.1 * (deviation.detach() - self.deviation)
        self.num_batches += 1
        return (x - mean) / deviation * r + d


# -- counters, schedules, random numbers -------------------------------------------------------------------------------


def closing(kept: Any, value: Callable[[Any, Any, Any], Tensor], **options: Any) -> Training:
    """Build a training whose loss adds a function of ``kept``."""

    def loss(model: Any, batch: Any) -> Tensor:
        return classified(model, batch) + value(kept, model, batch)

    return trained(Net(), loss, kept={"kept": kept}, **options)


def curriculum(kept: dict[str, Any], model: Any, batch: Any) -> Tensor:
    """Implement a curriculum: after the fourth call, a tensor is written that was untouched before."""
    kept["step"] += 1
    if kept["step"] <= 4:
        return torch.zeros(())
    kept["hard"].mul_(0.9).add_(model(batch["x"]).detach().mean(0))
    return (model(batch["x"]) - kept["hard"]).square().mean()


def class_counts(kept: dict[int, Any], model: Any, batch: Any) -> Tensor:
    """Count samples per class in numpy integers: effective numbers of samples."""
    for label in batch["y"].tolist():
        kept[label] = kept.get(label, numpy.int64(0)) + numpy.int64(1)
    weight = torch.tensor([1 / float(kept.get(label, 1)) for label in range(CLASSES)])
    return functional.cross_entropy(model(batch["x"]), batch["y"], weight=weight)


def class_counts_in_array(kept: Any, model: Any, batch: Any) -> Tensor:
    numpy.add.at(kept, batch["y"].numpy(), 1)
    weight = torch.from_numpy(1 / numpy.maximum(kept, 1)).float()
    return functional.cross_entropy(model(batch["x"]), batch["y"], weight=weight)


def confusion(kept: Tensor, model: Any, batch: Any) -> Tensor:
    out = model(batch["x"])
    kept.index_put_((batch["y"], out.argmax(1)), torch.ones(len(out), dtype=torch.long), accumulate=True)
    return out.square().mean() * (1 + 0.01 * kept.diagonal().sum())


def cached_words(kept: dict[Any, int], model: Any, batch: Any) -> Tensor:
    """Assign the next number to each new text: a growing vocabulary."""
    numbers = [kept.setdefault(tuple(row), len(kept)) for row in batch["x"].tolist()]
    return model(batch["x"])[:, 0].mean() * sum(numbers) * 0.01


def cached_tensors(kept: dict[Any, Tensor], model: Any, batch: Any) -> Tensor:
    """Cache the output of each text's first occurrence, and decay it at later ones."""
    for row, out in zip(batch["x"][:, :1].tolist(), model(batch["x"]).detach(), strict=True):
        kept.setdefault(tuple(row), out.clone()).mul_(0.9)
    return sum(one.mean() for one in kept.values()) * model(batch["x"]).mean()


def first_loss(kept: dict[str, Any], model: Any, batch: Any) -> Tensor:
    """Store the first loss and the ratios of later losses to it (GradNorm, DWA)."""
    value = model(batch["x"]).square().mean()
    kept.setdefault("first", float(value))
    kept.setdefault("ratios", []).append(float(value) / kept["first"])
    return value * sum(kept["ratios"][-2:])


def sorted_losses(kept: list[float], model: Any, batch: Any) -> Tensor:
    """Use the rank of the loss among all previous ones (self-paced learning)."""
    value = model(batch["x"]).square().mean()
    bisect.insort(kept, float(value))
    return value * (kept.index(float(value)) + 1)


def hardest(kept: list[float], model: Any, batch: Any) -> Tensor:
    """Keep the largest losses in a heap."""
    value = model(batch["x"]).square().mean()
    (heapq.heappush if len(kept) < 3 else heapq.heapreplace)(kept, float(value))
    return value / (1 + kept[0])


def reservoir(kept: dict[str, Any], model: Any, batch: Any) -> Tensor:
    """Keep a random sample of previous inputs, drawn by a separate generator (replay)."""
    kept["seen"] += 1
    kept["items"] = [*kept["items"], batch["x"][0].clone()]
    kept["items"] = kept["random"].sample(kept["items"], min(3, len(kept["items"])))
    return model(torch.stack(kept["items"])).square().mean()


def annealed(kept: dict[str, float], model: Any, batch: Any) -> Tensor:
    """Use Gumbel-softmax with a falling temperature."""
    kept["temperature"] = max(0.5, kept["temperature"] * 0.9)
    return functional.gumbel_softmax(model(batch["x"]), kept["temperature"]).square().mean()


def consistent(_: Any, model: Any, batch: Any) -> Tensor:
    """Compare two passes with different dropout masks (R-Drop)."""
    first, second = (functional.dropout(model(batch["x"]), 0.2).log_softmax(1) for _ in range(2))
    return functional.kl_div(first, second, log_target=True, reduction="batchmean")


def mixed(model: Any, batch: Any) -> Tensor:
    """Apply mixup with numpy's beta distribution, torch's permutation and Python's random numbers."""
    vectors, y = model.e(batch["x"]).mean(1), batch["y"]
    share = float(numpy.random.beta(0.4, 0.4)) if random.random() < 0.8 else 1.0
    order = torch.randperm(len(y))
    out = model.b(share * vectors + (1 - share) * vectors[order])
    return share * functional.cross_entropy(out, y) + (1 - share) * functional.cross_entropy(out, y[order])


class OwnDropout(nn.Module):
    """Dropout with a separate generator; the mask of the pass is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.mask = torch.Generator().manual_seed(4), None

    def forward(self, x: Tensor) -> Tensor:
        self.mask = torch.rand(x.shape, generator=self.generator) > 0.2
        return x * self.mask / 0.8


class StochasticDepth(Net):
    """A net with a layer that is skipped at random, with a rate that rises from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.rate = nn.Linear(WIDTH, WIDTH), 0.1

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        self.rate = min(self.rate + 0.05, 0.9)
        return h if random.random() < self.rate else h + self.middle(h)


class ReversedGradient(Net):
    """Gradient reversal in a hook of the pass's tensor, with a factor that a counter raises."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.last = 0, None

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        self.passes += 1
        h.register_hook(partial(self.reverse, factor=1 / self.passes))
        return h

    def reverse(self, gradient: Tensor, factor: float) -> Tensor:
        self.last = gradient.mean(0)
        return gradient - 0.1 * factor * gradient.sum(0)


# -- what a pass changes for a moment ----------------------------------------------------------------------------------


def evaluated_for_a_moment(model: Any, batch: Any) -> Tensor:
    """Compute pseudo-labels in evaluation mode, and return to training mode."""
    model.eval()
    with torch.no_grad():
        labels = model(batch["x"]).argmax(1)
    model.train()
    return functional.cross_entropy(model(batch["x"]), labels) + classified(model, batch)


def frozen_for_a_moment(model: Any, batch: Any) -> Tensor:
    model.e.requires_grad_(False)
    value = model(batch["x"]).square().mean()
    model.e.requires_grad_(True)
    return value + classified(model, batch)


def hooked_for_a_moment(model: Any, batch: Any) -> Tensor:
    """Read features of a layer with a hook that exists for one pass."""
    features: list[Tensor] = []
    handle = model.b.register_forward_hook(lambda _, inputs, out: features.append(inputs[0]) or out * 1.01)
    out = model(batch["x"])
    handle.remove()
    return functional.cross_entropy(out, batch["y"]) + 0.1 * features[0].square().mean()


def hooked_tensor_for_a_moment(model: Any, batch: Any) -> Tensor:
    """Scale the gradients of a weight in the backward pass with a hook that removes itself."""
    handles: list[Any] = []

    def hook(gradient: Tensor) -> Tensor:
        handles[0].remove()
        return gradient * 0.5

    handles.append(model.b.weight.register_hook(hook))
    return classified(model, batch)


def replaced_for_a_moment(model: Any, batch: Any) -> Tensor:
    """Replace the forward method of a layer for one pass."""
    original = model.b.forward
    model.b.forward = lambda h: original(h) * 1.1
    out = model(batch["x"])
    del model.b.forward
    return functional.cross_entropy(out, batch["y"])


def deterministic_for_a_moment(model: Any, batch: Any) -> Tensor:
    """Change the default dtype for some numbers."""
    torch.set_default_dtype(torch.float64)
    weight = torch.linspace(1, 2, CLASSES)
    value = (model(batch["x"]) * weight).square().mean()
    torch.set_default_dtype(torch.float32)
    return value + classified(model, batch)


def rate_in_loss() -> Training:
    """Build a training whose loss lowers the learning rate of its optimizer."""
    model = Net()
    optimizer = adamw(model.parameters())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        optimizer.param_groups[0]["lr"] *= 0.9
        return classified(model, batch)

    return Training(model, optimizer, loss)


def schedule_in_loss() -> Training:
    """Build a training with a schedule that is stepped in each pass."""
    model = Net()
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = classified(model, batch)
        schedule.step()
        return value

    return Training(model, optimizer, loss, kept={"schedule of the loss": schedule})


def moments_in_loss() -> Training:
    """Build a training whose loss damps the moments of its optimizer."""
    model = Net()
    optimizer = adamw(model.parameters())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.9)
        return classified(model, batch)

    return Training(model, optimizer, loss)


RECIPES: dict[str, Callable[[], Training]] = {
    "FGM": lambda: fast_gradient(False),
    "FGM, weights exchanged": lambda: fast_gradient(True),
    "FGM, backward in the loss": backward_inside,
    "PGD": projected_gradient,
    "FreeLB": lambda: free_perturbation(False),
    "FreeLB, perturbation kept": lambda: free_perturbation(True),
    "free adversarial training": free_adversarial,
    "vectors with gradients in the batch": lambda: vectors_given(True),
    "vectors with gradients, summed over batches": lambda: vectors_given(False),
    "VAT": virtual_adversarial,
    "SAM in the loss": sharpness_aware,
    "noise on weights for a pass": noisy_weights,
    "mean teacher": mean_teacher,
    "average of weights in a dict": weights_in_dict,
    "Reptile": reptile,
    "MAML": meta_learning,
    "memory in a deque (MoCo)": memory_in_deque,
    "memory in a deque, cut all the same": lambda: memory_in_deque(recut_loss=True),
    "cross-batch memory": cross_batch_memory,
    "queue of negatives": negatives,
    "centre loss": centres,
    "BatchRenorm": lambda: trained(mlp(BatchRenorm()), recut_loss=True),
    "curriculum": lambda: closing({"step": 0, "hard": torch.zeros(CLASSES)}, curriculum),
    "curriculum with a large tensor": lambda: closing(
        {"step": 0, "hard": torch.zeros(CLASSES, 400_000)[:, 0]}, curriculum
    ),
    "counts of classes, numbers of numpy": lambda: closing({}, class_counts),
    "counts of classes, array of numpy": lambda: closing(numpy.zeros(CLASSES, numpy.int64), class_counts_in_array),
    "confusion matrix": lambda: closing(torch.zeros(CLASSES, CLASSES, dtype=torch.long), confusion),
    "vocabulary that grows": lambda: closing({}, cached_words),
    "cache of tensors": lambda: closing({}, cached_tensors),
    "ratios to the first loss": lambda: closing({}, first_loss),
    "losses in order": lambda: closing([], sorted_losses),
    "losses in a heap": lambda: closing([], hardest),
    "replay": lambda: closing({"seen": 0, "items": [], "random": random.Random(1)}, reservoir),
    "temperature that falls": lambda: closing({"temperature": 2.0}, annealed),
    "R-Drop": lambda: closing(None, consistent),
    "mixup": lambda: trained(Net(), mixed, recut_loss=True),
    "dropout of its own": lambda: trained(mlp(OwnDropout())),
    "stochastic depth": lambda: trained(StochasticDepth()),
    "gradient reversal": lambda: trained(ReversedGradient()),
    "evaluation for a moment": lambda: trained(
        mlp(nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)), evaluated_for_a_moment, recut_batch_norm=True
    ),
    "frozen for a moment": lambda: trained(Net(), frozen_for_a_moment),
    "hook for a moment": lambda: trained(Net(), hooked_for_a_moment),
    "hook of a weight for a moment": lambda: trained(Net(), hooked_tensor_for_a_moment),
    "forward replaced for a moment": lambda: trained(Net(), replaced_for_a_moment),
    "default type for a moment": lambda: trained(Net(), deterministic_for_a_moment),
    "rate lowered in the loss": rate_in_loss,
    "schedule stepped in the loss": schedule_in_loss,
    "moments damped in the loss": moments_in_loss,
}


def kinds() -> list[Kind]:
    """Return all kinds of this module, with AdamW."""
    return [Kind("recipes", name, make) for name, make in RECIPES.items()]
