"""The distillation settings of a job; see `docs/distill.md`.

Does NOT check that the teacher's folder exists or that its model fits the job: that error is raised when it is opened.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from plimsoll.records.base import Frozen


class DistillSource(Frozen):
    """A teacher model: its folder, the ``temperature`` that softens predictions, and the weight ``hard`` of the labels.

    ``hidden`` is the weight of an additional loss, the difference of hidden states. ``form`` is the way to store the
    teacher's weights; ``None`` chooses by device. ``cache`` is the number of likeliest tokens per position that are
    stored in a file, which then replaces the teacher; ``None``: the teacher runs in each step.
    """

    teacher: str = Field(min_length=1)
    temperature: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    hard: float = Field(default=0.5, ge=0, le=1)
    hidden: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    form: Literal["mapped", "int8", "memory"] | None = None
    cache: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _agrees(self) -> DistillSource:
        if self.cache and self.hidden:
            raise ValueError(
                f"cache {self.cache} stores the teacher's predictions, but not the hidden states that hidden "
                f"{self.hidden:g} needs: leave out one of the two"
            )
        return self

    def fault(self, order: str, anew: str) -> str | None:
        """Return the reason why distillation cannot be used with the data of a job; ``None`` if it can.

        Args:
            order: the value of ``data.order``, the order of the samples.
            anew: the name of the field of ``data`` that makes samples change each time they are read; empty if the job
                sets no such field.
        """
        if order == "streams":
            return (
                "distill needs independent samples, but data.order: streams carries the state from window to window: "
                "use another order, or leave out distill"
            )
        if self.cache and anew:
            return (
                f"distill.cache {self.cache} stores the teacher's predictions for fixed samples, but "
                f"data.{anew} changes samples each time they are read: leave out one of the two"
            )
        return None
