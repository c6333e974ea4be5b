"""What was found when a loss was computed whole and in parts, before a batch is cut: whether it may be."""

from __future__ import annotations

from typing import Literal

from plimsoll.records.base import Frozen

Verdict = Literal["additive", "known", "not additive", "not shown", "allowed", "never cut", "not computed"]


class LossCheck(Frozen):
    """Whether the loss of a batch is the sum of those of its parts, each by its share of what the loss averages over.

    ``verdict`` is ``additive`` where samples have shown it, ``known`` where it follows from what computes the loss,
    ``not additive`` where they have shown that it is not, ``not shown`` where they could not, ``allowed`` where it was
    not shown and the user allows it (``recut_loss``), ``never cut`` where the user does not, and ``not computed`` where
    there was nothing to compute with, such as a model without memory: then the training finds out.

    ``whole`` and ``parts`` are the loss of ``num_samples`` samples, at once and one by one; ``difference`` is that of
    the two, and ``gradient_difference`` that of their gradients (``None``: not compared), as shares of their size.
    """

    verdict: Verdict
    why: str = ""
    remedy: str = ""
    num_samples: int = 0
    whole: float | None = None
    parts: float | None = None
    difference: float | None = None
    gradient_difference: float | None = None

    @classmethod
    def not_computed(cls, why: str) -> LossCheck:
        """What is found where nothing could be computed."""
        return cls(verdict="not computed", why=f"{why}: the training finds out before it cuts a batch")

    @property
    def may_cut(self) -> bool:
        """Whether a batch may be cut, as far as is known."""
        return self.verdict in {"additive", "known", "allowed", "not computed"}

    @property
    def sentence(self) -> str:
        """What was found, for a person."""
        if self.verdict == "additive":
            found = f"{self.num_samples} samples have the same loss at once and one by one"
            return f"{found}, and the same gradients" if self.gradient_difference is not None else found
        return self.why
