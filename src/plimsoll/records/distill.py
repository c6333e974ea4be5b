"""What a job says of a model that teaches; see `docs/distill.md`.

It does NOT check that there is such a folder, and that its model fits the job: that is said where it is opened.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from plimsoll.records.base import Frozen


class DistillSource(Frozen):
    """A model that teaches: its folder, how softly (``temperature``), and how much the labels count beside it.

    ``hidden`` is how much hidden states count beyond that; ``form`` where the teacher's weights are, ``None`` as suits
    the device; ``cache`` how many words of each position are kept in a file, in place of the teacher.
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
                f"cache {self.cache} keeps what the teacher says, and none of its hidden states, which hidden "
                f"{self.hidden:g} needs: leave out one of the two"
            )
        return self

    def fault(self, order: str, anew: str) -> str | None:
        """Say why it cannot go with the data of a job, ``None`` if it can.

        Args:
            order: of the samples.
            anew: the field by which samples are made anew each time they are read, empty if none does.
        """
        if order == "streams":
            return (
                "distill is for samples that stand alone, and data.order: streams has windows that go on where those "
                "before end, of which the teacher would have to keep the state: use another order, or leave out distill"
            )
        if self.cache and anew:
            return (
                f"distill.cache {self.cache} keeps what the teacher says of samples that stay as they are, and "
                f"data.{anew} makes them anew each time: leave out one of the two"
            )
        return None
