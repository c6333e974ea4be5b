"""Adam's moments in 8 or 4 bits in place of 32, for the whole run: a quarter or an eighth of the optimizer states.

What is kept of a moment is a code for each number and a scale for each block of them, as torchao does it (8 bits:
Dettmers et al. 2021, arXiv:2110.02861; 4 bits: Li et al. 2023, arXiv:2309.01507). The update itself is in fp32, and
takes the temporaries of a part of a parameter at a time: see `plimsoll.techniques.mechanisms.low_bit_adam`.

Numerics: lossy; close to Adam, and not the same training. Parameters of fewer than 4096 numbers keep the moments of
Adam. Does NOT cover amsgrad, sparse gradients, and going on from states of Adam.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.low_bit_adam import LEAST_ELEMENTS, LowBitAdam, is_quantized
from plimsoll.techniques.mechanisms.replaced_optimizer import (
    ReplacedOptimizer,
    conflict,
    groups_for,
    obstacle,
    optimizer_replaced,
)
from plimsoll.techniques.mechanisms.technique import Choices, Exported, Setting

_BITS = (8, 4)
_KEPT = ("lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay")


class LowBitOptimizer(ReplacedOptimizer):
    """`Technique`: Adam or AdamW with moments of few bits."""

    name = "low_bit_optimizer"
    numerics = "lossy"
    summary = "Adam's moments in 8 or 4 bits"
    exports: ClassVar = {
        "transformers": lambda choice, _: Exported({"optim": "adamw_8bit"}) if choice.options.get("bits") == 8 else None
    }
    by_hand = "use torchao.optim.AdamW8bit or AdamW4bit"
    remedies: ClassVar = {"optimizer_states": 1}

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Both, also where they are not allowed: a plan says what they would open."""
        return _obstacle(workload) or tuple(Choice(technique=self.name, options={"bits": bits}) for bits in _BITS)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """It has to be allowed, with a number of bits there is, and the optimizer one that it can stand in for."""
        if choice.options.get("bits") not in _BITS:
            return f"bits is {choice.options.get('bits')}: choose 8 or 4"
        return conflict(self.name, others, workload, setting) or _obstacle(workload)

    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Replace the optimizer."""
        new = LowBitAdam(groups_for(workload.optimizer, _KEPT), bits=int(choice.options["bits"]))
        return optimizer_replaced(workload, new)


def _obstacle(workload: Workload) -> str | None:
    """Why the moments cannot be of few bits, whoever allows it, or ``None``."""
    reason = obstacle(workload)
    if reason is not None:
        return reason
    groups = workload.optimizer.param_groups
    if any(group["amsgrad"] for group in groups):
        return "amsgrad keeps a third moment, which it does not have"
    if not any(is_quantized(parameter) for group in groups for parameter in group["params"]):
        return f"no parameter has {LEAST_ELEMENTS} numbers or more, and smaller ones keep the moments of Adam"
    return None
