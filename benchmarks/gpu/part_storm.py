"""Memory taken at random moments by another process, in every phase of a training, with an exact ledger.

The other process fills the GPU except for `FREE_BYTES`. At random moments, every few steps, it takes that memory too,
for a part of a step. Meanwhile a thread of the training empties torch's cache at random moments, so that any phase may
have to ask the driver and be refused. If no fallback is left, the training waits and repeats the batch, as `plimsoll
train` does.

*One way*: one micro-batch, with dropout. Losses and weights after every step equal the same undisturbed training bit
for bit. So does a training that is resumed from a checkpoint of the storm. *Smaller*: fallbacks with fewer samples,
without dropout: rounding differs, so losses and weights are close. Each sample counts once.

Without a GPU, the training requests impossible amounts of memory in a random phase.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.gpu.parts import ROOT, Task, environment

from plimsoll import TrainStep
from plimsoll.errors import OutOfMemoryError, TornStepError
from plimsoll.records.plan import micro_batch_choice
from plimsoll.records.run import OomEvent
from plimsoll.step.failpoints import armed

FREE_BYTES = 3 << 30
PHASES = ("forward", "backward", "optimizer", "evaluation")  # saving copies to the host without device memory
INJECTED = ("forward", "loss", "backward", "clip", "optimizer")
EVALUATED = (10_000, 10_001)  # batch numbers
FEWEST_STEPS, MOST_STEPS, EVALUATE_EVERY, SAVE_EVERY = 12, 400, 2, 5
# In steps: time between two disturbances, their duration, and time between two emptyings of the cache.
PAUSE_STEPS, HELD_STEPS, GIVEN_STEPS = (1.0, 4.0), (0.1, 0.6), (0.05, 0.4)
CLOSE_LOSS, CLOSE_WEIGHTS = 1e-5, 1e-3
_LENGTH, _VOCABULARY = 256, 2000
_STORM_SHARE = 0.4  # of the remaining time, for each of the two
_AGAIN_SECONDS = 0.02
_LEFT_BYTES = 8 << 20  # of a full GPU: the driver's granularity is 2 MiB


@dataclass
class Trained:
    """A training, step by step; `digests` are of all weights."""

    losses: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    ledger: list[tuple[int, int, float]] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    waited: int = 0
    num_cut: int = 0
    seconds: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Storm:
    """The training, and the path of its checkpoint."""

    device: str
    tiny: bool
    dropout: float
    sizes: tuple[int, ...]
    saved: Path
    tell: Callable[[str], None] = print

    @property
    def batch_size(self) -> int:
        return self.sizes[0]

    def make(self) -> tuple[torch.nn.Module, torch.optim.Optimizer, TrainStep]:
        torch.manual_seed(0)
        width, heads, layers = (32, 4, 2) if self.tiny else (384, 6, 4)
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
        config = transformers.GPT2Config(
            vocab_size=_VOCABULARY, n_positions=_LENGTH, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=0,
            eos_token_id=0, **dropout,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config).train().to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        fallbacks = [(micro_batch_choice(samples),) for samples in self.sizes]
        return model, optimizer, TrainStep(model, optimizer, units="next-tokens", clip_norm=1.0, fallbacks=fallbacks)

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(number)
        ids = torch.randint(0, _VOCABULARY, (self.batch_size, 16 if self.tiny else _LENGTH), generator=drawn)
        return {"input_ids": ids, "labels": ids}

    def train(
        self, num_steps: int, until: float = float("inf"), disturbed: bool = False, resume: bool = False
    ) -> Trained:
        """Train until the steps are done or, in the storm, every phase was hit or the time is over."""
        found, drawn = Trained(), random.Random(0)
        model, optimizer, step = self._again(found, self.make)
        if resume:
            saved = torch.load(self.saved, weights_only=False)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            step.load_state_dict(saved["step"])
            step.backend.restore_random_state(saved["random"])

        def note(event: OomEvent) -> None:
            found.events[event.phase or "?"] += 1

        while step.num_steps < num_steps and not (disturbed and self._is_enough(found, until)):
            phase = drawn.choice(INJECTED) if disturbed and drawn.random() < 0.5 else None
            with self._failing(phase, 1, 2):
                result = self._again(found, lambda: step(self.batch(step.num_steps), on_oom=note))
            found.seconds.append(result.step_seconds)
            found.losses.append(result.loss)
            found.num_cut += result.micro_batch < self.batch_size
            found.ledger.append((result.step, result.num_samples, result.num_units))
            found.digests.append(digest(model))
            if result.step % EVALUATE_EVERY == 0:
                self._evaluate(found, step, disturbed)
            if disturbed and result.step % SAVE_EVERY == 0:
                random_state = self._again(found, step.backend.random_state)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                            "step": step.state_dict(), "random": random_state}, self.saved)  # fmt: skip
        found.weights = [parameter.detach().cpu() for parameter in model.parameters()]
        step.close()
        return found

    def _evaluate(self, found: Trained, step: TrainStep, disturbed: bool) -> None:
        with self._failing("evaluation" if disturbed else None, 1):
            evaluation = self._again(found, lambda: step.evaluate(map(self.batch, EVALUATED)))
        found.events["evaluation"] += len(evaluation.oom_events)
        found.evaluations.append(evaluation.loss)
        if disturbed:
            self.tell(f"step {step.num_steps}, ran out of memory {sum(found.events.values())} times")

    def _failing(self, phase: str | None, *hits: int) -> contextlib.AbstractContextManager[None]:
        """Make these passages of a phase run out of memory if there is no GPU."""
        return armed(phase, *hits) if phase and self.device == "cpu" else contextlib.nullcontext()

    def _again(self, found: Trained, work: Any) -> Any:
        """Repeat a function until memory suffices."""
        while True:
            try:
                return work()
            except TornStepError:
                raise
            except (OutOfMemoryError, torch.OutOfMemoryError):
                found.waited += 1
                time.sleep(_AGAIN_SECONDS)

    def _is_enough(self, found: Trained, until: float) -> bool:
        is_met = all(found.events[phase] for phase in PHASES) and len(found.losses) >= FEWEST_STEPS
        return is_met or time.monotonic() > until


def digest(model: torch.nn.Module) -> str:
    found = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


# -- the other process -------------------------------------------------------------------------------------------------


def start_taker(task: Task) -> subprocess.Popen[str] | None:
    """Start the process that takes memory on request; return None without a GPU."""
    if task.is_tiny:
        return None
    return subprocess.Popen(
        [sys.executable, "-m", __spec__.name, task.device], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=environment(task, PYTORCH_NO_CUDA_MEMORY_CACHING="1"), text=True, bufsize=1,
    )  # fmt: skip


@contextlib.contextmanager
def taken_away(taker: subprocess.Popen[str] | None, seconds: float, step_seconds: float) -> Iterator[dict[str, float]]:
    """Let the other process take memory, and this one empty its cache, while the block runs."""
    told: dict[str, float] = {}
    if taker is None:
        yield told
        return
    assert taker.stdin is not None
    assert taker.stdout is not None
    taker.stdin.write(f"{seconds} {step_seconds}\n")
    if taker.stdout.readline() != "full\n":
        raise RuntimeError("the other process could not fill the card: see what it said above")
    over = threading.Event()
    giver = threading.Thread(target=give_back, args=(over, step_seconds))
    giver.start()
    try:
        yield told
    finally:
        over.set()
        giver.join()
        output, _ = taker.communicate("over\n")
        told |= json.loads(output.splitlines()[-1])


def give_back(over: threading.Event, step_seconds: float) -> None:
    """Empty the allocator's cache at random moments."""
    drawn = random.Random(1)
    while not over.wait(drawn.uniform(*GIVEN_STEPS) * step_seconds):
        torch.cuda.empty_cache()


def take(device: str) -> None:
    """Fill the GPU except for the free bytes on request, and repeatedly take those too until told to end."""
    torch.zeros(1, device=device)
    seconds, step_seconds = map(float, sys.stdin.readline().split())
    drawn, over, times, held_seconds = random.Random(2), threading.Event(), 0, 0.0
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    ballast = torch.empty(max(torch.cuda.mem_get_info()[0] - FREE_BYTES, 0), dtype=torch.uint8, device=device)
    print("full", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not over.wait(drawn.uniform(*PAUSE_STEPS) * step_seconds):
        begun, until = time.monotonic(), time.monotonic() + drawn.uniform(*HELD_STEPS) * step_seconds
        held: list[torch.Tensor] = []
        while time.monotonic() < until:
            held += rest_of_card(device)
        held.clear()
        times, held_seconds = times + 1, held_seconds + time.monotonic() - begun
    print(json.dumps({"times": times, "held_seconds": round(held_seconds, 2), "ballast_bytes": ballast.numel()}))


def rest_of_card(device: str) -> list[torch.Tensor]:
    """Allocate the free memory; another process may be quicker."""
    num_bytes = torch.cuda.mem_get_info()[0] - _LEFT_BYTES
    if num_bytes > 0:
        with contextlib.suppress(RuntimeError):
            return [torch.empty(num_bytes, dtype=torch.uint8, device=device)]
    return []


# -- the part ----------------------------------------------------------------------------------------------------------


def run_part(task: Task) -> None:
    transformers.utils.logging.set_verbosity_error()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # otherwise products are not reproducible
    torch.use_deterministic_algorithms(True)
    sizes = (8, 4, 2, 1) if task.is_tiny else (32, 16, 8, 4)
    whole = Storm(task.device, task.is_tiny, 0.1, sizes[:1], task.folder / "saved.pt", task.tell)
    cut = Storm(task.device, task.is_tiny, 0.0, sizes, task.folder / "saved-cut.pt", task.tell)
    takers = [start_taker(task) for _ in range(2)]
    told, disturbed_ones = [], []
    for storm, taker in zip((whole, cut), takers, strict=True):
        step_seconds = min(storm.train(3).seconds)  # kernels are loaded now, which needs driver memory once
        task.tell(f"a step takes {step_seconds:.3f} s undisturbed")
        span = _STORM_SHARE * task.seconds_left
        with taken_away(taker, span, step_seconds) as found:
            disturbed_ones.append(storm.train(MOST_STEPS, time.monotonic() + span, disturbed=True))
        told.append(found)
    one, other = disturbed_ones
    for name, storm, disturbed in (("one way", whole, one), ("smaller", cut, other)):
        judge(task, name, storm, disturbed, storm.train(len(disturbed.losses)))
    if whole.saved.is_file():
        resumed = whole.train(len(one.losses), resume=True)
        is_same = resumed.digests == one.digests[len(one.digests) - len(resumed.digests) :]
        task.check("one way: gone on from what was saved in the storm", f"{len(resumed.digests)} steps",
                   "the same bits", is_same)  # fmt: skip
    row = {"taken": told, "events": {"one way": one.events, "smaller": other.events}}
    task.say({"id": "storm", "kind": "storm", "steps": [len(one.losses), len(other.losses)], **row})


def judge(task: Task, name: str, storm: Storm, disturbed: Trained, calm: Trained) -> None:
    events = ", ".join(f"{number} {phase}" for phase, number in disturbed.events.most_common())
    missed = [phase for phase in PHASES if not disturbed.events[phase]]
    if missed:
        task.not_reached(f"{name}: an event in {', '.join(missed)}")
    num_events = sum(disturbed.events.values())
    task.check(f"{name}: ran out of memory", f"{num_events}: {events}; waited {disturbed.waited} times, "
               f"{disturbed.num_cut} steps cut", "survived", num_events > 0)  # fmt: skip
    wanted = [(number + 1, storm.batch_size) for number in range(len(disturbed.losses))]
    samples = [entry[:2] for entry in disturbed.ledger]
    task.check(f"{name}: every sample counts once", f"{sum(number for _, number in samples)} samples",
               f"{len(wanted)} steps of {storm.batch_size}",
               samples == wanted and disturbed.ledger == calm.ledger)  # fmt: skip
    loss = largest(disturbed.losses, calm.losses)
    evaluated = largest(disturbed.evaluations, calm.evaluations)
    if len(storm.sizes) == 1:
        num_same = sum(one == other for one, other in zip(disturbed.digests, calm.digests, strict=True))
        task.check(f"{name}: weights after each step", f"{num_same} of {len(calm.digests)} the same",
                   "the same bits", num_same == len(calm.digests))  # fmt: skip
        task.check(f"{name}: losses", f"{loss:.1e} apart", 0, loss == 0)
    else:
        difference = sum(float((a - b).double().square().sum())
                         for a, b in zip(disturbed.weights, calm.weights, strict=True)) ** 0.5  # fmt: skip
        size = sum(float(one.double().square().sum()) for one in calm.weights) ** 0.5
        task.check(f"{name}: final weights", f"{difference / size:.1e} apart", f"{CLOSE_WEIGHTS:.0e}",
                   difference / size <= CLOSE_WEIGHTS)  # fmt: skip
        task.check(f"{name}: losses", f"{loss:.1e} apart", f"{CLOSE_LOSS:.0e}", loss <= CLOSE_LOSS)
    task.check(f"{name}: evaluations", f"{evaluated:.1e} apart", f"{CLOSE_LOSS:.0e}", evaluated <= CLOSE_LOSS)


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(a / b - 1) for a, b in zip(one, other, strict=True)), default=0.0)


if __name__ == "__main__":
    take(sys.argv[1])
