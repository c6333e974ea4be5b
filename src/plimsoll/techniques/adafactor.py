"""Adafactor in place of Adam or AdamW: no momentum, and second moments as a row and a column instead of a matrix.

``torch.optim.Adafactor`` (Shazeer and Stern 2018, arXiv:1804.04235). The states of a matrix of n x m are n + m numbers
where Adam has 2 n m, so optimizer states all but vanish.

The learning rate means what it means for Adam: a step changes a number by about so much. Adafactor's own would be
relative to the size of the parameter (at most ``lr * max(eps2, RMS(parameter))``), a fifty times shorter step for the
weights of a GPT-2. With ``eps2`` of 1, the bound from below, it is ``lr`` itself for every parameter whose RMS is at
most 1.

Numerics: lossy, another training. Does NOT cover amsgrad (there is none), L2 decay as of Adam (it is decoupled as of
AdamW), sparse gradients, and going on from states of Adam.
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
    summary = "Adafactor in place of Adam: nearly no optimizer states"
    kernels = ("foreach", "loop")
    exports: ClassVar = {"transformers": lambda _choice, _: Exported({"optim": "adafactor"})}
    by_hand = 'use transformers.Adafactor, or optim="adafactor" in the Trainer'
    remedies: ClassVar = {"optimizer_states": 2}

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """The one choice, also where it is not allowed: a plan says what it would open."""
        return obstacle(workload) or (Choice(technique=self.name),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """It has to be allowed, and the optimizer one that it can stand in for."""
        return conflict(self.name, others, workload, setting)

    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Replace the optimizer."""
        new = torch.optim.Adafactor(groups_for(workload.optimizer, _KEPT), eps=_EPSILONS)
        return optimizer_replaced(workload, new)
