"""Adafactor in place of Adam or AdamW: no momentum, and second moments as a row and a column instead of a matrix.

``torch.optim.Adafactor`` (Shazeer and Stern 2018, arXiv:1804.04235). For an n x m matrix
it stores n + m numbers, where Adam stores 2 n m, so optimizer states almost vanish.

The learning rate means the same as for Adam: a step changes each weight by about ``lr``. By default, Adafactor's step
is relative to the size of the parameter (at most ``lr * max(eps2, RMS(parameter))``). For the weights of a GPT-2, such
a step would be fifty times shorter. Here the lower bound ``eps2`` is 1, so the step is ``lr`` itself for each parameter
whose RMS is at most 1.

Numerics: lossy, it changes the training. Weight decay is decoupled as in AdamW, even if it replaces Adam, whose decay
is an L2 penalty. Does NOT cover amsgrad, sparse gradients, and resuming from states of Adam.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

import torch

from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.replaced_optimizer import (
    ReplacedOptimizer,
    conflict,
    groups_for,
    obstacle,
    optimizer_replaced,
)
from plimsoll.techniques.mechanisms.technique import Choices, Exported, Setting

_EPSILONS = (None, 1.0)
_KEPT = ("lr", "weight_decay", "maximize", "foreach")


class Adafactor(ReplacedOptimizer):
    """`Technique`: Adafactor in place of Adam and AdamW."""

    name = "adafactor"
    numerics = "lossy"
    summary = "Adafactor in place of Adam: almost no optimizer states"
    kernels = ("foreach", "loop")
    exports: ClassVar = {"transformers": lambda _choice, _: Exported({"optim": "adafactor"})}
    by_hand = 'use transformers.Adafactor, or optim="adafactor" in the Trainer'
    remedies: ClassVar = {"optimizer_states": 2}

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice, even if the job does not allow it: a plan reports the gain from allowing it."""
        return obstacle(workload) or (Choice(technique=self.name),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the job does not allow this technique, or the optimizer cannot be replaced."""
        return conflict(self.name, others, workload, setting)

    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Replace the optimizer with Adafactor."""
        new = torch.optim.Adafactor(groups_for(workload.optimizer, _KEPT), eps=_EPSILONS)
        return optimizer_replaced(workload, new)
