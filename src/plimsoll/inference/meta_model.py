"""A model that is to be applied to texts, without its weights: what a plan of it is made from.

    applied = Applied.open(folder, "score", dtype=None, new_tokens=0)
    applied.rehearse(CpuLowering(), rows=8, longest_tokens=256, outside=())

Does NOT read a weight: the model is on the meta device, and of the checkpoint only the headers are looked at.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plimsoll.errors import InputError
from plimsoll.inference.dry_run import dry_run_inference
from plimsoll.inference.model import require_head
from plimsoll.memory.lowering.base import Lowering
from plimsoll.models.inference import InferenceTask, inference_task, read_config
from plimsoll.models.loading import sketch_checkpoint
from plimsoll.models.names import RECURRENT
from plimsoll.records.trace import Trace
from plimsoll.techniques.mechanisms.parts import ModelPart, parts_of

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class Applied:
    """A model on the meta device and the task it is for."""

    name: str
    task: InferenceTask
    model: nn.Module
    parts: tuple[ModelPart, ...]
    files: tuple[Path, ...]
    new_tokens: int
    is_converted: bool

    @classmethod
    def open(cls, folder: Path, task: str, dtype: torch.dtype | None, new_tokens: int) -> Applied:
        """Look at a checkpoint.

        Args:
            folder: of the checkpoint.
            task: one of `plimsoll.models.inference`.
            dtype: of the weights; ``None`` as they are stored.
            new_tokens: that are made of each row.

        Raises:
            InputError: if it is no checkpoint, or not one for the task: it lacks the head, for example.
        """
        made = inference_task(task, folder)
        if read_config(folder).get("architecture") in RECURRENT:
            raise InputError(
                f"{folder} is a recurrent model, which has no blocks to place: leave out the plan, it is applied as a "
                "whole"
            )
        if new_tokens and task != "generate":
            raise InputError(
                f"{new_tokens} new tokens were asked for, and the task `{task}` makes none: leave them out, or use "
                "the task `generate`"
            )
        skeleton, checkpoint = sketch_checkpoint(folder, head=made.head, dtype=dtype)
        require_head(folder, made.head, skeleton.missing)
        model: Any = skeleton.model
        if made.head == "classification" and model.config.pad_token_id is None:
            # Several rows need one; which, is chosen for each pass (`plimsoll.inference.passes`).
            model.config.pad_token_id = model.config.get_text_config().pad_token_id = 0
        model.eval().requires_grad_(False)
        return cls(task, made, model, parts_of(model), tuple(checkpoint.files), new_tokens, dtype is not None)

    @property
    def num_passes(self) -> int:
        """How often the model computes for the rows of a pass: once, and once more for each new token but the first."""
        return max(self.new_tokens, 1)

    @property
    def dtype(self) -> str:
        """Of most of its weights, by bytes."""
        sizes: dict[str, int] = {}
        for weight in self.model.parameters():
            name = str(weight.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + weight.nbytes
        return max(sizes, key=sizes.__getitem__, default="float32")

    @property
    def described(self) -> str:
        """A line that says what it is."""
        num_weights = sum(weight.numel() for weight in self.model.parameters())
        return f"{type(self.model).__name__}, {num_weights / 1e6:,.1f} M weights"

    def require_length(self, longest_tokens: int) -> None:
        """Refuse rows that are longer than the model's positions.

        Raises:
            InputError: if they are.
        """
        config: Any = getattr(self.model, "config", None)
        most = next((most for name in _LENGTH_FIELDS if (most := getattr(config, name, None)) is not None), None)
        needed = longest_tokens + max(self.new_tokens - 1, 0)
        if isinstance(most, int) and needed > most:
            raise InputError(
                f"rows of {longest_tokens} tokens and {self.new_tokens} new ones are longer than the model can read, "
                f"{most} tokens: give shorter ones"
            )

    def dry_run(self, lowering: Lowering, rows: int, longest_tokens: int, outside: Collection[str]) -> Trace:
        """Trace one pass; see `dry_run_inference`."""
        return dry_run_inference(
            self.model, self.task.compute, lowering,
            rows=rows, longest_tokens=longest_tokens, outside=outside, new_tokens=self.new_tokens,
        )  # fmt: skip
