"""The program of each rank in the tests: a few steps of a small model, with out-of-memory events drawn from a seed.

`tests.ranks_started` starts one process per rank; each writes its results to a separate file.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from plimsoll.data.batch import Units, split_batch
from plimsoll.data.batches.loader import iterate_once
from plimsoll.device.base import backend_for
from plimsoll.distributed.ranks import PeerOutOfMemory, Ranks, joined
from plimsoll.errors import InputError, OutOfMemoryError, TornStepError
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.run import OomEvent
from plimsoll.step.collective import attempt_collectively
from plimsoll.step.failpoints import armed, exhaust_memory, failpoint
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep
from plimsoll.training.accuracy import Accuracy

PHASES = ("copy", "forward", "loss", "backward", "clip", "optimizer", "evaluation")
NUM_STEPS = 6
BATCH_SAMPLES = 7
NUM_WIDE = 3 << 20
WIDE_SAMPLE_BYTES = 3 * NUM_WIDE * 4
"""Memory of the product, its tanh, and the gradient of one of them."""


def small_model() -> nn.Module:
    """Return a model with parameters that only some samples give a gradient."""
    torch.manual_seed(0)
    return Gated()


class Gated(nn.Module):
    """A classifier; samples whose first feature is positive also pass through another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gated, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(features))
        chosen = features[:, 0] > 0
        if chosen.any():
            hidden = hidden + torch.where(chosen[:, None], self.gated(hidden), 0)
        logits: torch.Tensor = self.last(hidden)
        return logits


class Wide(nn.Module):
    """A classifier with large activations and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(3, NUM_WIDE // 3) / 100)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.tanh(features[:, 0, None, None] * self.scale).mean(-1) * 100


class Block(nn.Module):
    """A block that a model repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 19), nn.Linear(19, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        failpoint("forward")  # between the exchanges of two blocks
        out: torch.Tensor = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        if out.requires_grad:
            out.register_hook(lambda gradient: failpoint("backward"))
        return out


class WideBlock(Block):
    """A block with a different inner width, and with a buffer that its forward pass uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
        self.register_buffer("shift", torch.arange(16.0) / 100)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + self.shift.to(hidden.dtype))


class BroadBlock(Block):
    """A block with large activations and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ramp", torch.linspace(0, 1, NUM_WIDE))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + torch.tanh(hidden[:, :1] * self.ramp).mean(-1, keepdim=True)


class Stack(nn.Module):
    """A classifier of repeated blocks, whose number of rows is not divisible by any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.first(features)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.last(hidden)
        return logits


class Mixed(Stack):
    """Blocks of different sizes with buffers, one of them frozen, and an output layer tied to embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WideBlock(width) for width in (19, 40, 7)])
        self.blocks[1].requires_grad_(False)
        self.words = nn.Embedding(3, 16)
        with torch.no_grad():
            self.words.weight /= 10  # the scale of an output layer: a loss of 20 has fewer digits than a loss of 1
        self.last.weight = self.words.weight

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.first(features) + self.words((features[:, 0] > 0).long())
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.last(hidden)
        return logits


def stacked_model(is_mixed: bool = False, is_wide: bool = False) -> nn.Module:
    """Return a model whose blocks can be sharded."""
    torch.manual_seed(0)
    model = Mixed() if is_mixed else Stack()
    if is_wide:
        model.blocks[1] = BroadBlock()
    return model


def fallbacks_of(case: dict[str, Any]) -> list[tuple[Choice, ...]] | None:
    """Return the fallbacks of a case, if it has any: shards, and smaller micro-batches."""
    if "gathered" not in case:
        return None
    shards: tuple[Choice, ...] = ()
    if case["gathered"] is not None:
        options = {name: case[name] for name in ("gathered", "offload", "dtype") if name in case}
        shards = (Choice(technique="fully_shard", options=options),)
    return [(*shards, micro_batch_choice(size)) for size in (4, 2, 1)]


def batch_of(step: int, is_first_small: bool = False) -> dict[str, torch.Tensor]:
    """Return the batch of a step; the last one has fewer samples than ranks, and the first one may have, too."""
    generator = torch.Generator().manual_seed(step)
    num_samples = 2 if step == NUM_STEPS - 1 else 1 if is_first_small and step == 0 else BATCH_SAMPLES
    return {
        "features": torch.randn(num_samples, 6, generator=generator),
        "labels": torch.randint(0, 3, (num_samples,), generator=generator),
    }


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over the samples."""
    return nn.functional.cross_entropy(model(batch["features"]), batch["labels"])


def contrastive(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compare each sample with all others of its pass."""
    scores = model(batch["features"])
    return nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


def weighted(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a mean over the weights of the labels."""
    return nn.functional.cross_entropy(model(batch["features"]), batch["labels"], weight=WEIGHT)


def weights_of(batch: dict[str, torch.Tensor]) -> float:
    """Return the normalizer of `weighted`."""
    return float(WEIGHT[batch["labels"]].sum())


WEIGHT = torch.tensor([1.0, 3.0, 0.25])
LOSSES = {"contrastive": contrastive, "weighted": weighted}


def cut_over_ranks(ranks: Ranks, case: dict[str, Any]) -> dict[str, Any]:
    """Train with a different loss; if it is refused, return the message and the changes so far."""
    model, before = small_model(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units: Units = weights_of if case["units"] == "weights" else case["units"]
    step = TrainStep(model, optimizer, LOSSES[case["own_loss"]], units=units, ranks=ranks)
    losses: list[float] = []
    refused = not_evaluated = ""
    try:
        evaluation = TrainStep(model, optimizer, LOSSES[case["own_loss"]], units=units, ranks=ranks)
        evaluation.evaluate([part_of(batch_of(0), ranks)])
    except InputError as error:
        not_evaluated = str(error)
    try:
        losses.extend(step(part_of(batch_of(number), ranks)).loss for number in range(NUM_STEPS))
    except InputError as error:
        refused = str(error)
    is_as_before = all(map(torch.equal, model.parameters(), before.parameters()))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {
        "losses": losses, "weights": weights.tolist(), "refused": refused, "not_evaluated": not_evaluated,
        "is_as_before": is_as_before,
    }  # fmt: skip


def read(case: dict[str, Any], ranks: Ranks) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's parts of the evaluation data; memory may run out while reading."""
    if ranks.rank in case.get("unread_on", ()):
        exhaust_memory()
    for step in (0, NUM_STEPS - 1):
        yield part_of(batch_of(step), ranks)


def part_of(batch: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return this rank's part of a batch, which may be empty."""
    part = {name: field[ranks.rank :: ranks.world_size] for name, field in batch.items()}
    return part if len(part["labels"]) else {}


def train(ranks: Ranks, case: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank; the ``failures`` of a case are triples of rank, phase and passage."""
    with ExitStack() as stack:
        is_mixed, is_first_small = case.get("is_mixed", False), case.get("is_first_small", False)
        is_wide = case.get("wide", False)
        small = Wide if is_wide else small_model
        model = stacked_model(is_mixed, is_wide) if fallbacks_of(case) is not None else small()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if case.get("precision") or is_first_small or is_wide:  # Adam divides by gradients that are only rounding
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if isinstance(model, Wide):  # a million equivalent weights
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        step = TrainStep(
            model, optimizer, loss_of, units="samples", clip_norm=case.get("clip_norm"), ranks=ranks,
            fallbacks=fallbacks_of(case), precision=case.get("precision", "fp32"), recut_loss="limited_rank" in case,
        )  # fmt: skip
        if case.get("precision") == "fp16":
            step._scaler = torch.amp.GradScaler(init_scale=2.0**10, device="cpu")
            _make_infinite(step, case.get("infinite"))
        step._commit._chunk_bytes = case.get("chunk_bytes") or step._commit._chunk_bytes
        hits: dict[str, set[int]] = {}
        for rank, phase, passage in case.get("failures", ()):
            if rank == ranks.rank:
                hits.setdefault(phase, set()).add(passage)
        for phase, passages in hits.items():
            stack.enter_context(armed(phase, *passages))
        if case.get("limited_rank") == ranks.rank:
            # Gradients and optimizer states fit, and the activations of some of its samples.
            held_bytes = 3 * NUM_WIDE * 4 + BATCH_SAMPLES // 2 * WIDE_SAMPLE_BYTES
            if not isinstance(model, Wide):
                held_bytes = int(2.6 * WIDE_SAMPLE_BYTES)
            stack.enter_context(step.backend.limited(step.backend.use().used_bytes + held_bytes))
        losses, events, samples = [], [], []
        for number in range(NUM_STEPS):
            part = part_of(batch_of(number, is_first_small), ranks)
            while True:
                try:
                    result = step(part)
                except TornStepError:
                    raise
                except OutOfMemoryError:  # no smaller fallback is left: undone on every rank, and repeated here
                    continue
                break
            losses.append(result.loss)
            samples.append(result.num_samples)
            events.extend((event.phase, event.rank, event.action) for event in result.oom_events)
        while True:
            try:
                evaluation = step.evaluate(read(case, ranks))
            except PeerOutOfMemory:  # on all ranks: repeated, as in `plimsoll train`
                case = case | {"unread_on": ()}
                continue
            except OutOfMemoryError:
                continue
            break
        events.extend((event.phase, event.rank, event.action) for event in evaluation.oom_events)
        step.close()
        every = max(NUM_WIDE // 1000, 1) if isinstance(model, Wide) else 1
        weights = torch.cat([parameter.detach().flatten()[::every] for parameter in model.parameters()])
        return {
            "losses": losses, "events": events, "samples": samples, "weights": weights.tolist(),
            "evaluation": evaluation.loss,
        }  # fmt: skip


class Parrot(nn.Module):
    """Answers with its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, answers: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = nn.functional.one_hot(answers, 3) * self.scale
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits, labels))


class Windows:
    """Windows: every three samples are windows of one text, except for the last two."""

    num_samples = 11

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, ids: np.ndarray) -> dict[str, torch.Tensor]:
        answers = torch.tensor([0, 1, 1, 2, 2, 0, 1, 0, 0, 0, 0])
        return {"answers": answers[ids], "labels": torch.tensor([1, 2, 1, 0])[torch.from_numpy(ids) // 3]}

    def parents(self, ids: np.ndarray) -> np.ndarray:
        return ids // 3

    def num_of_parents(self, parents: np.ndarray) -> np.ndarray:
        return np.where(parents == 3, 2, 3)


class Short:
    """An object that cannot be sent the first time, because memory runs out."""

    has_failed = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        if not self.has_failed:
            self.has_failed = True
            exhaust_memory()
        return Short, ()


def tell(ranks: Ranks) -> None:
    """Send an object that one rank has no memory for: all ranks are told, none waits, and it can be sent again."""
    own: Any = Short() if ranks.rank == 1 else [ranks.rank] * 10_000
    backend, position = backend_for("cpu"), Position(phase="evaluation")
    found = [attempt_collectively(lambda: ranks.gather_agreed(own), backend, position, ranks) for _ in range(2)]
    assert isinstance(found[0], OomEvent) or ranks.is_alone
    assert isinstance(found[1], list)
    assert found[1][0] == [0] * 10_000
    assert [type(one) for one in found[1][1:2]] == [Short][: ranks.world_size - 1]


def judge(ranks: Ranks, case: dict[str, Any]) -> dict[str, Any]:
    """Evaluate windows of texts on this rank; every batch of four splits texts."""
    tell(ranks)
    model, windows = Parrot(), Windows()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), units="samples", ranks=ranks)
    batches = ((one.fields, one.sample_ids) for one in iterate_once(windows, 4, ranks.rank, ranks.world_size))
    failing = case["failing"] if ranks.rank == case["rank"] else ()
    with armed("evaluation", *failing), Accuracy(model, step.position, windows, ranks) as accuracy:
        evaluation = step.evaluate(accuracy.counted(batches))
    return {"loss": evaluation.loss, "samples": evaluation.num_samples, "accuracy": accuracy.share()}


def train_in_half(ranks: Ranks, case: dict[str, Any]) -> dict[str, Any]:
    """Train in plain PyTorch like gathering in bf16: a bf16 copy of the weights computes, and fp32 weights learn.

    Samples are split as on the ranks of ``half_for``, in micro-batches of 4, because each pass rounds its gradients.
    """
    model, world_size = stacked_model(case.get("is_mixed", False)), case["half_for"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for block in model.blocks:  # type: ignore[union-attr]  # its input is cast, but not the model's
        block.register_forward_pre_hook(lambda _, inputs: tuple(one.to(torch.bfloat16) for one in inputs))

    def loss_in_half(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        halves = {name: one.to(torch.bfloat16) for name, one in model.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(lambda features: functional_call(model, halves, (features,)), batch)  # type: ignore[arg-type]

    losses = []
    for number in range(NUM_STEPS):
        batch = batch_of(number, case.get("is_first_small", False))
        optimizer.zero_grad()
        total = 0.0
        for rank in range(world_size):
            part = {name: field[rank::world_size] for name, field in batch.items()}
            for piece in split_batch(part, 4) if len(part["labels"]) else ():
                loss = loss_in_half(piece) * (len(piece["labels"]) / len(batch["labels"]))
                loss.backward()
                total += loss.item()
        if case.get("clip_norm") is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case["clip_norm"])
        optimizer.step()
        losses.append(total)
    with torch.no_grad():
        parts = [(loss_in_half(one).item(), len(one["labels"])) for one in (batch_of(0), batch_of(NUM_STEPS - 1))]
    evaluation = sum(loss * number for loss, number in parts) / sum(number for _, number in parts)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return {"losses": losses, "weights": weights, "evaluation": evaluation, "events": []}


def _make_infinite(step: TrainStep, infinite: tuple[int, int] | None) -> None:
    """Make a gradient infinite in one step on one rank before it is unscaled; a single process uses its only rank."""
    clip = step._clip
    number, rank = infinite or (-1, 0)

    def clip_infinite() -> float | None:
        if step.num_steps == number and rank % step.ranks.world_size == step.ranks.rank:
            have_one = (one for group in step.workload.optimizer.param_groups for one in group["params"])
            next(one for one in have_one if one.grad is not None and one.grad.numel()).grad.view(-1)[0] = math.inf
        return clip()

    step._clip = clip_infinite  # type: ignore[method-assign]


def random_shards_case(seed: int, world_size: int) -> dict[str, Any]:
    """Draw the places where memory runs out, and the sharding of the model."""
    chance = random.Random(-seed)
    case = random_case(seed, world_size) | {"gathered": chance.choice(["once", "twice"])}
    case |= {"is_mixed": chance.random() < 0.5, "is_first_small": chance.random() < 0.3}
    return case | ({"offload": "disk"} if chance.random() < 0.5 else {})


def random_case(seed: int, world_size: int) -> dict[str, Any]:
    """Draw the places where memory runs out: a few passages of some phases, on one, some or all ranks."""
    chance = random.Random(seed)
    failures = {}
    for _ in range(chance.randint(1, 3)):
        phase, passage = chance.choice(PHASES), chance.randint(1, 8)
        for rank in chance.sample(range(world_size), chance.randint(1, world_size)):
            # An indivisible part of the update may fail once; after that only a checkpoint helps.
            failures[rank, phase, 0 if phase == "optimizer" else passage] = passage + chance.randint(0, 1)
    return {
        "clip_norm": chance.choice([None, 1.0]),
        "chunk_bytes": chance.choice([None, 64]),
        "unread_on": chance.sample(range(world_size), chance.randint(0, world_size)),
        "failures": [(rank, phase, passage) for (rank, phase, _), passage in failures.items()],
    }


WORK = {"failing": judge, "half_for": train_in_half, "own_loss": cut_over_ranks}
"""The functions for cases that have a field."""


def main(folder: Path) -> None:
    """Run every case of ``cases.json``, and write the result of each in one line."""
    with joined() as ranks, (folder / f"rank-{ranks.rank}.jsonl").open("w") as file:
        for case in json.loads((folder / "cases.json").read_text()):
            work = next((do for field, do in WORK.items() if field in case), train)
            file.write(json.dumps(work(ranks, case)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
