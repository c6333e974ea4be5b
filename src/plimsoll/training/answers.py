"""The answers of a model, seen while its loss is evaluated: no second pass over the samples.

A batch that runs out of memory is evaluated once more in smaller micro-batches. So of a batch only the last answer to
each of its samples counts. Of ranks that share a batch each is told the answers of all, and counts them. Does NOT cover
models that return no ``logits``: of these there are no answers.

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
    """What says of which text each sample is."""

    def parents(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the text of each sample."""
        ...

    def num_of_parents(self, parents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many samples each of these texts has."""
        ...


class Answered(NamedTuple):
    """One sample of the data: its number there, its label or labels, and what is kept of the logits."""

    sample_id: int
    label: Tensor
    answer: Tensor


class Answers(ABC):
    """Counts something of a model's answers while the block runs.

    Args:
        model: returns ``logits`` (B, ...).
        position: says which samples of its batch the model is evaluating.
        ranks: who share each batch.
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
        """Yield the batches, given with the numbers of their samples; each is counted before the next is asked for.

        Raises:
            PeerOutOfMemory: if memory ran out on another rank before it could say what its answers were.
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
        # As arrays: a tensor that is a row of a batch would be sent with all of the batch.
        own = [(one.sample_id, one.label.numpy(), one.answer.numpy()) for one in answered]
        return [
            Answered(sample_id, torch.as_tensor(label), torch.as_tensor(answer))
            for every in self._ranks.gather_agreed(own)
            for sample_id, label, answer in every
        ]

    @abstractmethod
    def _answers_of(self, logits: Tensor) -> Tensor:
        """Return what is kept of the logits of a pass, sample by sample."""

    @abstractmethod
    def _count(self, answered: Sequence[Answered]) -> None:
        """Count the samples of a batch, of all ranks, in the order of their numbers; there is at least one."""

    def _note(self, _model: nn.Module, _positional: Any, output: Any) -> None:
        logits, samples = getattr(output, "logits", None), self._position.samples
        if logits is not None and len(samples):
            self._answers.update(zip(samples, self._answers_of(logits.detach()).cpu(), strict=True))
