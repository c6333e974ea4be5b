"""Adam's moments in 8 or 4 bits in place of 32, for the whole run: a quarter or an eighth of the optimizer states.

A moment is stored as a code for each element and a scale for each block of elements, as in torchao. The 8-bit codes are
from Dettmers et al. 2021 (arXiv:2110.02861), the 4-bit codes from Li et al. 2023 (arXiv:2309.01507). The update runs in
fp32 on one chunk of a parameter at a time, which bounds its temporaries
(`plimsoll.techniques.mechanisms.low_bit_adam`).

Numerics: lossy; the training is close to Adam's, but not the same. Parameters with fewer than 4096 elements keep fp32
moments. Does NOT cover amsgrad, sparse gradients, and resuming from states of Adam.
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
    """`Technique`: Adam or AdamW with 8-bit or 4-bit moments."""

    name = "low_bit_optimizer"
    numerics = "lossy"
    summary = "Adam's moments in 8 or 4 bits"
    exports: ClassVar = {
        "transformers": lambda choice, _: Exported({"optim": "adamw_8bit"}) if choice.options.get("bits") == 8 else None
    }
    by_hand = "use torchao.optim.AdamW8bit or AdamW4bit"
    remedies: ClassVar = {"optimizer_states": 1}

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return choices of 8 and 4 bits, even if the job allows neither: a plan reports the gain if it did."""
        return _obstacle(workload) or tuple(Choice(technique=self.name, options={"bits": bits}) for bits in _BITS)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the job does not allow this technique, or the bits or the optimizer exclude it."""
        if choice.options.get("bits") not in _BITS:
            return f"bits is {choice.options.get('bits')}: choose 8 or 4"
        return conflict(self.name, others, workload, setting) or _obstacle(workload)

    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Replace the optimizer with a low-bit Adam."""
        new = LowBitAdam(groups_for(workload.optimizer, _KEPT), bits=int(choice.options["bits"]))
        return optimizer_replaced(workload, new)


def _obstacle(workload: Workload) -> str | None:
    """Return the reason why the moments cannot be stored in few bits, even if the user allows it.

    ``None``: they can.
    """
    reason = obstacle(workload)
    if reason is not None:
        return reason
    groups = workload.optimizer.param_groups
    if any(group["amsgrad"] for group in groups):
        return "amsgrad keeps a third moment, which low_bit_optimizer does not support"
    if not any(is_quantized(parameter) for group in groups for parameter in group["params"]):
        return f"no parameter has {LEAST_ELEMENTS} numbers or more, and smaller ones keep fp32 moments"
    return None
