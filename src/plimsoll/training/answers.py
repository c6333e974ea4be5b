"""Metrics from the logits that a model computes while its loss is evaluated, without a second pass.

An answer is the part of the logits that a metric keeps for one sample. A batch that runs out of memory is evaluated
again in smaller micro-batches, so only the last answer to each sample counts. Ranks that share a batch exchange their
answers, and each rank counts all answers. Does NOT handle models that return no ``logits``: nothing is counted.

Shapes: B samples of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.distributed.ranks import Ranks
from plimsoll.step.oom_boundary import Position


class Windows(Protocol):
    """A mapping from samples to texts, for a data set whose samples are windows of texts."""

    def parents(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each sample in ``ids``, the number of the text that it is a window of."""
        ...

    def num_of_parents(self, parents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each text in ``parents``, the number of samples that are windows of it."""
        ...


class Answered(NamedTuple):
    """One sample: its number in the data set, its label or labels, and the part of the logits that is kept."""

    sample_id: int
    label: Tensor
    answer: Tensor


class Answers(ABC):
    """A base class of metrics that count the answers of a model inside a ``with`` block.

    Args:
        model: a model that returns ``logits``, (B, ...).
        position: holds the indices, in the batch, of the samples that the model is evaluating.
        ranks: processes that share each batch.
    """

    def __init__(self, model: nn.Module, position: Position, ranks: Ranks | None = None) -> None:
        self._model, self._position, self._ranks = model, position, ranks or Ranks()
        self._answers: dict[int, Tensor] = {}  # by the number of the sample in its batch

    def __enter__(self) -> Self:
        self._hook = self._model.register_forward_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def counted(self, batches: Iterable[tuple[Any, NDArray[np.int64]]]) -> Iterator[Any]:
        """Yield each batch, and count the model's answers to it before the next batch.

        Args:
            batches: batches with the numbers of their samples in the data set, (B,) int64.

        Raises:
            PeerOutOfMemory: if memory ran out on another rank before it could send its answers.
        """
        for batch, ids in batches:
            self._answers.clear()
            yield batch
            answered = self._of_all_ranks(
                [
                    Answered(int(ids[number]), batch["labels"][number], answer)
                    for number, answer in self._answers.items()
                ]
            )
            if answered:
                self._count(sorted(answered, key=lambda one: one.sample_id))

    def _of_all_ranks(self, answered: list[Answered]) -> list[Answered]:
        if self._ranks.is_alone:
            return answered
        # Send arrays, because pickling a tensor that is a row of a batch would send the whole batch.
        own = [(one.sample_id, one.label.numpy(), one.answer.numpy()) for one in answered]
        return [
            Answered(sample_id, torch.as_tensor(label), torch.as_tensor(answer))
            for every in self._ranks.gather_agreed(own)
            for sample_id, label, answer in every
        ]

    @abstractmethod
    def _answers_of(self, logits: Tensor) -> Tensor:
        """Return the part of the logits to keep, with one row per sample."""

    @abstractmethod
    def _count(self, answered: Sequence[Answered]) -> None:
        """Add the answers to one batch, from all ranks, to the metric.

        There is at least one answer. The answers are sorted by the number of the sample in the data set.
        """

    def _note(self, _model: nn.Module, _positional: Any, output: Any) -> None:
        logits, samples = getattr(output, "logits", None), self._position.samples
        if logits is not None and len(samples):
            self._answers.update(zip(samples, self._answers_of(logits.detach()).cpu(), strict=True))
