"""Forward passes over texts of unequal length: as many tokens per pass as fit, and results in the order of the texts.

Texts are sorted from longest to shortest to reduce padding. A pass takes as many texts as possible, such that rows
times columns are at most ``tokens_per_pass``. If memory runs out, the tensors of the pass are freed, and its texts are
repeated in smaller passes, down to single texts. A size that did not fit is not tried again
(`plimsoll.step.recovery.FallbackSchedule`, with sizes in tokens). If memory does not run out, passes depend on the
texts only, not on the machine.

Does not determine in advance how many tokens fit, and does not split a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from plimsoll.device.base import Backend
from plimsoll.errors import OutOfMemoryError
from plimsoll.models.inference import InferenceTask
from plimsoll.records.run import OomEvent
from plimsoll.step.failpoints import failpoint
from plimsoll.step.oom_boundary import Position, attempt
from plimsoll.step.recovery import FallbackSchedule, micro_batch_sizes

Result = TypeVar("Result")

Batch = dict[str, Tensor]

_GROW_AFTER = 50
"""Successful passes before larger ones are tried again, as in training."""


@dataclass
class PassCounts:
    """Statistics: the number of successful passes, their tokens without and with padding, and out-of-memory events."""

    num_passes: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0
    oom_events: list[OomEvent] = field(default_factory=list)


class Passes(Generic[Result]):
    """A runner of passes that remembers which sizes fit.

    Args:
        work: function that computes a batch and returns one result per text. It gets the batch (``input_ids`` and
            ``attention_mask``, (B, T) int64, on the device) and the indices of its texts.
        backend: the backend of the device.
        device: the device that computes.
        padding_id: the id of the token that pads short texts.
        tokens_per_pass: maximum rows times columns of a pass; a longer text gets its own pass.
        rows_per_pass: maximum texts per pass, even if they are short.
        more_tokens: tokens per text that ``work`` adds, such as generated tokens; they count as columns.
        side: the side on which texts are padded.
    """

    def __init__(  # noqa: PLR0917 -- one call
        self,
        work: Callable[[Batch, Sequence[int]], list[Result]],
        backend: Backend,
        device: torch.device,
        padding_id: int,
        tokens_per_pass: int,
        rows_per_pass: int,
        more_tokens: int = 0,
        side: Literal["left", "right"] = "right",
    ) -> None:
        self._work, self._backend, self._device = work, backend, device
        self._padding_id, self._side, self._more_tokens = padding_id, side, more_tokens
        self._rows_per_pass = rows_per_pass
        self._fallback_schedule = FallbackSchedule(micro_batch_sizes(tokens_per_pass), _GROW_AFTER)
        self._position = Position(phase="evaluation")
        self.counts = PassCounts()

    def run(self, texts: Sequence[Sequence[int]], between: Callable[[], None] = lambda: None) -> list[Result]:
        """Return the result of each text, in the order of the texts.

        Args:
            texts: the token ids of each text.
            between: function that is called before each pass.

        Raises:
            OutOfMemoryError: if not even a single text fits.
        """
        results: dict[int, Result] = {}
        waiting = sorted(range(len(texts)), key=lambda place: -len(texts[place]))  # a stable sort
        while waiting:
            between()
            fallback = self._fallback_schedule.choose(1.0)
            taken = waiting[: self._num_rows(fallback, len(texts[waiting[0]]))]
            found = self._attempted(texts, taken, fallback)
            if found is not None:
                results.update(zip(taken, found, strict=True))
                waiting = waiting[len(taken) :]
        return [results[place] for place in range(len(texts))]

    def _num_rows(self, fallback: int, longest_tokens: int) -> int:
        num_columns = max(longest_tokens + self._more_tokens, 1)
        return max(1, min(self._fallback_schedule.sizes[fallback].samples // num_columns, self._rows_per_pass))

    def _attempted(self, texts: Sequence[Sequence[int]], taken: list[int], fallback: int) -> list[Result] | None:
        """Return the results of one pass; ``None`` if memory ran out and smaller passes must be tried.

        ``taken`` are the indexes of the texts of the pass, and ``fallback`` is the current index in the fallback
        schedule.
        """
        batch = padded([texts[place] for place in taken], self._padding_id, self._side)
        num_tokens = len(taken) * (batch["input_ids"].shape[1] + self._more_tokens)
        self._position.micro_batch = len(taken)
        self._backend.use()  # updates the limit
        outcome = attempt(partial(self._pass, batch, taken), self._backend, self._position)
        if isinstance(outcome, OomEvent) and len(taken) == 1:
            outcome = self._last_resort(batch, taken, outcome)
        if not isinstance(outcome, OomEvent):
            self._fallback_schedule.held(fallback, num_tokens)
            self._count(batch)
            return outcome
        self._backend.release()
        following = self._fallback_schedule.failed(fallback, num_tokens, num_tokens)
        next_tokens = self._fallback_schedule.sizes[fallback if following is None else following].samples
        self._note(outcome, f"tokens of a pass {num_tokens:,} -> {min(next_tokens, num_tokens):,}")
        return None

    def _last_resort(self, batch: Batch, taken: list[int], event: OomEvent) -> list[Result]:
        """Retry the pass of a single text after all memory that can be freed has been freed; return its result."""
        self._backend.release(last_resort=True)
        self._note(event, "the same text again")
        outcome = attempt(partial(self._pass, batch, taken), self._backend, self._position)
        if isinstance(outcome, OomEvent):
            num_columns = batch["input_ids"].shape[1]
            more = f" and {self._more_tokens:,} new ones" if self._more_tokens else ""
            raise OutOfMemoryError(
                f"memory ran out for one text of {num_columns:,} tokens{more} ({outcome.shortage}); previous rows are "
                "kept: run the same command with a larger --budget to resume, or start over with a smaller "
                "--max-length and --force"
            )
        return outcome

    def _pass(self, batch: Batch, taken: list[int]) -> list[Result]:
        failpoint("evaluation")
        on_device = {name: tensor.to(self._device) for name, tensor in batch.items()}
        return self._work(on_device, taken)

    def _count(self, batch: Batch) -> None:
        self.counts.num_passes += 1
        self.counts.num_tokens += int(batch["attention_mask"].sum())
        self.counts.num_padded_tokens += batch["input_ids"].numel()

    def _note(self, event: OomEvent, action: str) -> None:
        self.counts.oom_events.append(event.model_copy(update={"step": None, "action": action}))


def computed_to_the_end(task: InferenceTask, model: Any, batch: Batch, vocab_size: int) -> tuple[Tensor, ...]:
    """Compute a batch with a model that reads the last token that is not padding, but has no padding token.

    Any token that does not occur in the texts can pad them. This function sets the lowest such id as the model's
    padding token. If all ids occur, texts are computed one by one, without padding. Return the tensors that
    ``task.compute`` returns, with one row per text.
    """
    padding_id = free_id(batch, vocab_size)
    if padding_id is None:
        alone = [
            {name: tensor[row : row + 1, : int(batch["attention_mask"][row].sum())] for name, tensor in batch.items()}
            for row in range(len(batch["input_ids"]))
        ]
        model.config.pad_token_id = model.config.get_text_config().pad_token_id = None
        parts = [task.compute(model, one) for one in alone]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
    ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, padding_id)
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = padding_id
    return task.compute(model, {**batch, "input_ids": ids})


def free_id(batch: Batch, vocab_size: int) -> int | None:
    """Return the lowest token id that does not occur in a batch; ``None`` if all ids occur."""
    is_used = torch.zeros(vocab_size, dtype=torch.bool, device=batch["input_ids"].device)
    is_used[batch["input_ids"][batch["attention_mask"].bool()]] = True
    return None if bool(is_used.all()) else int((~is_used).int().argmax())


def padded(texts: Sequence[Sequence[int]], padding_id: int, side: Literal["left", "right"] = "right") -> Batch:
    """Return texts as a batch on the CPU, padded to the longest: ``input_ids`` and ``attention_mask``, (B, T) int64."""
    num_columns = max(map(len, texts))
    ids = torch.full((len(texts), num_columns), padding_id, dtype=torch.long)
    mask = torch.zeros((len(texts), num_columns), dtype=torch.long)
    for row, tokens in enumerate(texts):
        place = slice(num_columns - len(tokens), None) if side == "left" else slice(0, len(tokens))
        ids[row, place] = torch.tensor(tokens, dtype=torch.long)
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}
