"""Gradient release: the optimizer updates each parameter in backward, and its gradient is freed at once.

The training step does it (`plimsoll.step.update.gradient_release`); here is where what undoes a step is kept meanwhile:
the old values and states in a mapped file where the training is on the CPU, and in pinned memory of the host where it
is on CUDA. They are as large as the sum of parameters and states, and written in every step.

Numerics: bitwise. Does NOT cover what needs all gradients before the first update: accumulation, clipping of the global
norm, a gradient scaler. Where the step has to cut a batch after all, it updates at the end as it does without this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.models.hooks import EarlyUpdates
from plimsoll.models.optimizers import is_separable
from plimsoll.models.workload import Workload, hooked
from plimsoll.records.plan import MICRO_BATCH, Choice
from plimsoll.techniques.autocast import Autocast
from plimsoll.techniques.by_length import ByLength
from plimsoll.techniques.mechanisms.pinned import PinnedPool
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique


class OptimizerInBackward(Technique):
    """`Technique`: update each parameter as soon as its gradient is complete."""

    name = "optimizer_in_backward"
    numerics = "bitwise"
    summary = "each parameter updated in backward, its gradient freed at once"
    modifies = frozenset({"optimizer"})
    reaches = frozenset({"gradients"})
    excludes: ClassVar = {ByLength.name: "by_length cuts the batch, so gradients are complete in the last pass only"}
    not_captured = "parameters are updated in backward"
    by_hand = "update each parameter in a hook: Tensor.register_post_accumulate_grad_hook"
    remedies: ClassVar = {"optimizer_temporaries": 1}
    stage = "update"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """One choice, unless the training itself forbids it."""
        return _obstacle(workload, setting) or (Choice(technique=self.name),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Nothing may need all gradients before the first update."""
        reasons = (_obstacle_of(other, setting) or self.excluded((other,)) for other in others)
        return next(filter(None, reasons), None) or _obstacle(workload, setting)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Say to the step where to keep what undoes an update."""
        pool = PinnedPool() if workload.device.type == "cuda" else MappedPool()
        with hooked(
            workload, replace(workload.hooks, update_early=EarlyUpdates(pool.copy_of, f"--forbid {self.name}"))
        ):
            yield


_SCALED = "fp16's scaler looks at all gradients before it lets any be used"


def _obstacle_of(other: Choice, setting: Setting) -> str | None:
    """Why another technique makes it impossible, or ``None``."""
    if other.technique == MICRO_BATCH and int(other.options["samples"]) < setting.batch_size:
        return (
            f"gradients add up over micro-batches of {other.options['samples']} of {setting.batch_size} samples, and "
            "are complete in the last one only"
        )
    if other.technique == Autocast.name and "fp16" in map(str, other.options.values()):
        return _SCALED
    return None


def _obstacle(workload: Workload, setting: Setting) -> str | None:
    if workload.clip_norm is not None:
        return f"clip_norm ({workload.clip_norm:g}) needs the norm of all gradients before the first update"
    if "fp16" in (workload.precision, setting.precision):
        return _SCALED
    if isinstance(workload.optimizer, torch.optim.LBFGS) or not is_separable(workload.optimizer):
        return f"{type(workload.optimizer).__name__} (or a hook on its step) may look at several parameters together"
    return None
