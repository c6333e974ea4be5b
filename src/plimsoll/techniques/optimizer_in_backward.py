"""Gradient release: the optimizer updates each parameter in backward, and its gradient is freed at once.

The training step implements it (`plimsoll.step.update.gradient_release`). A step is undone with copies of
the old parameters and states. This module provides the memory for the copies: a memory-mapped file on the CPU, pinned
host memory on CUDA. They are as large as all parameters and states together, and are written in every step.

Numerics: bitwise. Does NOT cover techniques that need all gradients before the first update: accumulation, clipping of
the global norm, a gradient scaler. If the step must split a batch nevertheless, it updates after the last micro-batch,
as without this technique.
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
        """Return one choice, unless the training itself needs all gradients at once."""
        return _obstacle(workload, setting) or (Choice(technique=self.name),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the training or another technique needs all gradients before the first update."""
        reasons = (_obstacle_of(other, setting) or self.excluded((other,)) for other in others)
        return next(filter(None, reasons), None) or _obstacle(workload, setting)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Make the step update in backward, and give it the memory for copies with which an update is undone."""
        pool = PinnedPool() if workload.device.type == "cuda" else MappedPool()
        with hooked(
            workload, replace(workload.hooks, update_early=EarlyUpdates(pool.copy_of, f"--forbid {self.name}"))
        ):
            yield


_SCALED = "the gradient scaler of fp16 must check all gradients before the first update"


def _obstacle_of(other: Choice, setting: Setting) -> str | None:
    """Return the reason why another technique makes updates in backward impossible; ``None`` if it does not."""
    if other.technique == MICRO_BATCH and int(other.options["samples"]) < setting.batch_size:
        return (
            f"gradients are summed over micro-batches of {other.options['samples']} of {setting.batch_size} samples, "
            "and are complete only in the last one"
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
