"""Made-up trainings in which every combination of techniques has a known peak and time, for testing a search."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import nn

from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.search.choices import Problem
from plimsoll.planning.search.evaluation import Evaluation, PhasePeak
from plimsoll.planning.search.pins import Decided
from plimsoll.records.plan import Choice, Duration
from plimsoll.records.prediction import Estimate
from plimsoll.techniques import Setting, Technique
from plimsoll.techniques.micro_batch import MicroBatch

NOTHING = Decided((), frozenset(), frozenset())
BATCH_SIZE = 16


@dataclass
class MadeUp(Technique):
    """A technique of a world: the bytes that each option saves per sample of forward and of the update."""

    name: str
    saves_per_sample: tuple[int, ...] = (0,)
    saves_fixed: int = 0
    seconds: tuple[float, ...] = (0.0,)
    numerics: str = "bitwise"
    reaches: frozenset[str] = frozenset({"activations"})
    is_for_the_run: bool = False
    may_be_faster: bool = False
    refuses: frozenset[str] = frozenset()
    reason: str | None = None
    summary: str = "made up"
    only_in: frozenset[str] = frozenset()
    is_traced: bool = True
    is_for_whole_batches: bool = False
    leaves_out_work: bool = False
    unoffered: dict[str, int] = field(default_factory=dict)

    def choices(self, workload, setting):
        if self.reason:
            return self.reason
        return tuple(Choice(technique=self.name, options={"level": n}) for n in range(len(self.seconds)))

    def conflicts(self, choice, others, workload, setting):
        if self.numerics == "lossy" and self.name not in setting.allow:
            return f"is lossy: allow it with `allow: [{self.name}]`"
        clash = sorted(self.refuses & {other.technique for other in others})
        if "small micro-batch" in self.refuses:
            sizes = [other.options["samples"] for other in others if other.technique == "micro_batch"]
            clash += [f"a micro-batch of {size}" for size in sizes if size < setting.batch_size]
        return f"not with {clash[0]}" if clash else None

    def install(self, workload, choice):
        return nullcontext()


@dataclass
class World:
    """A world with 100 fixed bytes in the passes, 200 in the update and 10 per sample; 1 s of work and 0.01 s per pass.

    With ``pass_seconds``, a technique takes its seconds in each pass, and parts add up to the peak, as in reality.
    """

    techniques: list[MadeUp]
    pass_seconds: float | None = None
    clashes_bytes: int = 0  # additional bytes of two techniques together
    asked: list = field(default_factory=list)

    @property
    def registry(self):
        return {"micro_batch": MicroBatch()} | {technique.name: technique for technique in self.techniques}

    def evaluate(self, choices):
        self.asked.append(choices)
        size = next(choice.options["samples"] for choice in choices if choice.technique == "micro_batch")
        others = [choice for choice in choices if choice.technique != "micro_batch"]
        num_passes = -(-BATCH_SIZE // size)
        per_sample, fixed, seconds = 10, 200, 1 + (self.pass_seconds or 0.01) * num_passes
        for choice in others:
            technique, level = self.registry[choice.technique], choice.options["level"]
            per_sample -= technique.saves_per_sample[min(level, len(technique.saves_per_sample) - 1)]
            fixed -= technique.saves_fixed
            seconds += technique.seconds[level] * (num_passes if self.pass_seconds else 1)
        passes = PhasePeak(100 + self.clashes_bytes * max(len(others) - 1, 0), max(per_sample, 1) * size)
        update = PhasePeak(fixed, 0)
        need = 50 + max(passes.fixed_bytes + passes.growing_bytes, fixed)
        parts = {"activations": max(per_sample, 1) * size, "parameters": 100, "optimizer states": 100}
        if self.pass_seconds and passes.fixed_bytes + passes.growing_bytes < fixed:
            parts["activations"] = 0
        return Evaluation(
            tuple(choices),
            size,
            Estimate(likely_bytes=need, low_bytes=need, high_bytes=need),
            True,
            Duration(likely_seconds=seconds, low_seconds=seconds, high_seconds=seconds),
            {"forward": passes, "optimizer": update},
            parts,
        )

    def problem(self, limit_bytes, decided=NOTHING, allow=()):
        model = nn.Linear(2, 2)
        workload = Workload(model, None, model_loss, "samples")
        setting = Setting(device="cpu", batch_size=BATCH_SIZE, allow=frozenset(allow))
        return Problem(workload, setting, limit_bytes, decided)
