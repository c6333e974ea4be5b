"""A model that is applied to texts, in a dry run: without its weights, its passes traced on fake tensors.

    applied = Applied.open(folder, "score", dtype=None, new_tokens=0)
    applied.dry_run(CpuLowering(), rows=8, longest_tokens=256, outside=())

What is traced is the task's own ``compute``, with the weights where the plan has them: those of parts on disk, or
beside a GPU on the host, are counted outside the device.

Does NOT read a weight (the model is on the meta device, and of the checkpoint only the headers are read) or texts
(every row is as long as it may be), and does not know what reading from the disk needs: pages of files are not the
process's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from plimsoll.errors import InputError
from plimsoll.inference.model import require_head
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.trace import DryRun, dry_run, failures_explained, with_unknown_lengths
from plimsoll.models.inference import InferenceTask, inference_task, read_config
from plimsoll.models.loading import sketch_checkpoint
from plimsoll.models.names import RECURRENT
from plimsoll.records.trace import Trace
from plimsoll.techniques.mechanisms.parts import ModelPart, block_names, parts_of
from plimsoll.techniques.mechanisms.streamed_layers import streamed

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
        """Read what a checkpoint holds, but not its weights.

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
            self.model,
            self.task.compute,
            lowering,
            rows=rows,
            longest_tokens=longest_tokens,
            outside=outside,
            new_tokens=self.new_tokens,
        )


Batch = dict[str, Tensor]
Compute = Callable[[nn.Module, Batch], Any]


def dry_run_inference(
    model: nn.Module,
    compute: Compute,
    lowering: Lowering,
    *,
    rows: int,
    longest_tokens: int,
    outside: Collection[str] = (),
    new_tokens: int = 0,
) -> Trace:
    """Trace one pass; beside a GPU, blocks that are not on it are copied to it as they are when they compute.

    Args:
        model: in the type it is applied in; on the meta device, or any other: it is not changed.
        compute: the task's.
        lowering: the target.
        rows: of the pass.
        longest_tokens: of each row.
        outside: the names of the parts (`plimsoll.techniques.mechanisms.parts`) that do not lie on the device.
        new_tokens: that are made of each row; ``compute`` makes the first.

    Raises:
        InputError: if the model fails, or cannot be traced.
    """

    def trace_with(keeps_all: bool) -> Trace:
        with dry_run(lowering, lambda: "forward", keeps_all) as stage:
            fake = _arrived(stage, model, outside)
            copied = block_names(model, outside) if lowering.kind == "cuda" else ()
            with (
                failures_explained(f"the model {type(model).__name__}", stage),
                torch.no_grad(),
                streamed(fake, copied, device=torch.device("cpu"), is_cyclic=True) if copied else nullcontext(),
            ):
                stage.recorder.step = 1
                compute(fake, stage.fake_batch(_batch(fake, rows, longest_tokens)))
                if new_tokens > 1:  # two steps: the prefill, and the last token with all keys and values that it sees
                    _last_token(stage, fake, rows, longest_tokens + new_tokens - 1)
            return stage.trace()

    return with_unknown_lengths(trace_with)


def _arrived(stage: DryRun, model: nn.Module, outside: Collection[str]) -> nn.Module:
    """The fake model, whose weights are known to be where they will be."""
    away = [weight for part in parts_of(model) if part.name in outside for weight in part.weights]
    fake = stage.fake_model(model, away).eval().requires_grad_(False)
    stage.recorder.know_model(fake)
    return fake


def _last_token(stage: DryRun, model: nn.Module, rows: int, num_seen: int) -> None:
    """The pass of the last new token, which sees itself and the keys and values of all before it."""
    stage.recorder.step = 0
    mask = stage.fake_batch(_batch(model, rows, num_seen))["attention_mask"]
    one = stage.fake_batch(_batch(model, rows, 1))
    cache = model(**one, use_cache=True).past_key_values
    for layer in cache.layers:
        _fill(layer, num_seen - 1)
    stage.recorder.step = 2
    model(input_ids=one["input_ids"], attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _fill(layer: Any, num_tokens: int) -> None:
    """Give a layer of transformers' cache the keys and values of so many tokens, or of those that it keeps."""
    num_kept = min(num_tokens, getattr(layer, "sliding_window", num_tokens + 1) - 1)  # the new token fills the window
    for name in ("keys", "values"):
        kept = getattr(layer, name, None)
        if isinstance(kept, Tensor):
            setattr(layer, name, kept.new_empty((*kept.shape[:-2], num_kept, kept.shape[-1])))
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = num_tokens


def _batch(model: nn.Module, rows: int, longest_tokens: int) -> Batch:
    """Rows as the reading makes them, all as long as can be."""
    config: Any = getattr(model, "config", None)
    vocab_size = int(getattr(config, "vocab_size", 2)) if config is not None else 2
    generator = torch.Generator().manual_seed(0)  # its own: the caller's random numbers stay as they are
    with _disable_current_modes():
        input_ids = torch.randint(vocab_size, (rows, longest_tokens), generator=generator)
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
