"""Dry runs of inference: passes of a model traced on fake tensors, without its weights.

    applied = Applied.open(folder, "score", dtype=None, new_tokens=0)
    applied.dry_run(CpuLowering(), rows=8, longest_tokens=256, outside=())

The task's own ``compute`` is traced, with each weight where the plan places it: on the device, on the host or on disk.
Only weights on the device count as device memory.

No weights are read (the model is on the meta device, and only the headers of the checkpoint are read), and no texts:
every row has the maximum length. Memory for reading from disk is not counted, because file pages are not private
memory.
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
    """A model on the meta device, with the inference task for which it is traced.

    ``name`` is the name of the task, and ``new_tokens`` is the number of tokens to generate for each row. ``parts`` are
    the blocks and other parts that a plan places on the device, on the host or on disk. ``files`` are the files of the
    checkpoint. ``is_converted`` is true if the weights are converted to a given data type when they are loaded.
    """

    name: str
    task: InferenceTask
    model: nn.Module
    parts: tuple[ModelPart, ...]
    files: tuple[Path, ...]
    new_tokens: int
    is_converted: bool

    @classmethod
    def open(cls, folder: Path, task: str, dtype: torch.dtype | None, new_tokens: int) -> Applied:
        """Read the structure of a checkpoint, without its weights.

        Args:
            folder: the checkpoint's folder.
            task: the name of a task of `plimsoll.models.inference`.
            dtype: data type of the weights; ``None``: as stored.
            new_tokens: number of tokens to generate for each row.

        Raises:
            InputError: if the folder is not a checkpoint, or not suitable for the task, for example because it lacks
                the head.
        """
        made = inference_task(task, folder)
        if read_config(folder).get("architecture") in RECURRENT:
            raise InputError(
                f"{folder} is a recurrent model, which has no blocks to place: leave out the plan, and apply it as a "
                "whole"
            )
        if new_tokens and task != "generate":
            raise InputError(
                f"{new_tokens} new tokens were requested, but the task `{task}` generates none: leave them out, or use "
                "the task `generate`"
            )
        skeleton, checkpoint = sketch_checkpoint(folder, head=made.head, dtype=dtype)
        require_head(folder, made.head, skeleton.missing)
        model: Any = skeleton.model
        if made.head == "classification" and model.config.pad_token_id is None:
            # Several rows need a padding token; `plimsoll.inference.passes` chooses one for each pass.
            model.config.pad_token_id = model.config.get_text_config().pad_token_id = 0
        model.eval().requires_grad_(False)
        return cls(task, made, model, parts_of(model), tuple(checkpoint.files), new_tokens, dtype is not None)

    @property
    def num_passes(self) -> int:
        """The number of forward passes per batch: one, and a further pass for each new token except the first."""
        return max(self.new_tokens, 1)

    @property
    def dtype(self) -> str:
        """The name of the data type with the most bytes of weights, such as ``float32``."""
        sizes: dict[str, int] = {}
        for weight in self.model.parameters():
            name = str(weight.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + weight.nbytes
        return max(sizes, key=sizes.__getitem__, default="float32")

    @property
    def described(self) -> str:
        """A one-line description: the model's class and its number of weights."""
        num_weights = sum(weight.numel() for weight in self.model.parameters())
        return f"{type(self.model).__name__}, {num_weights / 1e6:,.1f} M weights"

    def require_length(self, longest_tokens: int) -> None:
        """Raise an error if the model has too few positions for the rows.

        Args:
            longest_tokens: tokens of the longest row, without the tokens to generate.

        Raises:
            InputError: if the row and the tokens to generate need more positions.
        """
        config: Any = getattr(self.model, "config", None)
        most = next((most for name in _LENGTH_FIELDS if (most := getattr(config, name, None)) is not None), None)
        needed = longest_tokens + max(self.new_tokens - 1, 0)
        if isinstance(most, int) and needed > most:
            raise InputError(
                f"rows of {longest_tokens} tokens and {self.new_tokens} new ones exceed the model's maximum of "
                f"{most} tokens: give shorter ones"
            )

    def dry_run(self, lowering: Lowering, rows: int, longest_tokens: int, outside: Collection[str]) -> Trace:
        """Trace one pass of the task with this model; the arguments are the same as in `dry_run_inference`."""
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
    """Trace one pass of a model. If the target is a GPU, blocks in ``outside`` are copied to it when they compute.

    Args:
        model: the model, in the data type for inference, on any device, such as meta; it is not changed.
        compute: the task's function, which is called with the model and a batch.
        lowering: the lowering for the target device.
        rows: number of rows in the pass.
        longest_tokens: tokens per row.
        outside: names of the parts (`plimsoll.techniques.mechanisms.parts`) that are not on the device.
        new_tokens: number of tokens to generate for each row. ``compute`` generates the first; if there are more, the
            pass of the last one is traced as well.

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
                if new_tokens > 1:  # two steps: the prefill, then the last token, for which the cache is largest
                    _last_token(stage, fake, rows, longest_tokens + new_tokens - 1)
            return stage.trace()

    return with_unknown_lengths(trace_with)


def _arrived(stage: DryRun, model: nn.Module, outside: Collection[str]) -> nn.Module:
    """Return a fake copy of the model. All weights except the parts in ``outside`` are recorded as on the device."""
    away = [weight for part in parts_of(model) if part.name in outside for weight in part.weights]
    fake = stage.fake_model(model, away).eval().requires_grad_(False)
    stage.recorder.know_model(fake)
    return fake


def _last_token(stage: DryRun, model: nn.Module, rows: int, num_seen: int) -> None:
    """Trace the pass that generates the last new token. It attends to ``num_seen`` tokens: itself and all previous."""
    stage.recorder.step = 0
    mask = stage.fake_batch(_batch(model, rows, num_seen))["attention_mask"]
    one = stage.fake_batch(_batch(model, rows, 1))
    cache = model(**one, use_cache=True).past_key_values
    for layer in cache.layers:
        _fill(layer, num_seen - 1)
    stage.recorder.step = 2
    model(input_ids=one["input_ids"], attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _fill(layer: Any, num_tokens: int) -> None:
    """Resize the keys and values in a layer of a transformers cache, as after ``num_tokens`` tokens.

    A layer with a sliding window retains fewer tokens.
    """
    num_kept = min(num_tokens, getattr(layer, "sliding_window", num_tokens + 1) - 1)  # the new token fills the window
    for name in ("keys", "values"):
        kept = getattr(layer, name, None)
        if isinstance(kept, Tensor):
            setattr(layer, name, kept.new_empty((*kept.shape[:-2], num_kept, kept.shape[-1])))
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = num_tokens


def _batch(model: nn.Module, rows: int, longest_tokens: int) -> Batch:
    """Return a batch of random ids, ``input_ids`` and ``attention_mask`` (rows, longest_tokens), without padding."""
    config: Any = getattr(model, "config", None)
    vocab_size = int(getattr(config, "vocab_size", 2)) if config is not None else 2
    generator = torch.Generator().manual_seed(0)  # a separate generator leaves the caller's random state unchanged
    with _disable_current_modes():
        input_ids = torch.randint(vocab_size, (rows, longest_tokens), generator=generator)
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
