"""The answers of a model, seen while its loss is evaluated: no second pass over the samples.

A batch that runs out of memory is evaluated once more in smaller pieces. So of a batch only the last answer to each of
its samples counts. Does NOT cover models that return no ``logits``: of these there are no answers.

Shapes: B samples of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.run.boundary import Position
from plimsoll.workload import batch_size_of


class Windows(Protocol):
    """What says of which text each sample is."""

    def parents(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the text of each sample."""
        ...

    def num_of_parents(self, parents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many samples each of these texts has."""
        ...


class Answers(ABC):
    """Counts something of a model's answers while the block runs.

    Args:
        model: returns ``logits`` (B, ...).
        position: says which samples of its batch the model is evaluating.
    """

    def __init__(self, model: nn.Module, position: Position) -> None:
        self._model, self._position = model, position
        self._answers: dict[int, Tensor] = {}  # by the number of the sample in its batch

    def __enter__(self) -> Self:
        self._hook = self._model.register_forward_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def counted(self, batches: Iterable[tuple[Any, NDArray[np.int64]]]) -> Iterator[Any]:
        """Yield the batches, given with the numbers of their samples; each is counted before the next is asked for."""
        for batch, ids in batches:
            self._answers.clear()
            yield batch
            if self._answers:
                answers = {number: self._answers[number] for number in sorted(self._answers)}
                self._count(answers, batch["labels"], ids[: batch_size_of(batch)])

    @abstractmethod
    def _answers_of(self, logits: Tensor) -> Tensor:
        """Return what is kept of the logits of a pass, sample by sample."""

    @abstractmethod
    def _count(self, answers: Mapping[int, Tensor], labels: Tensor, ids: NDArray[np.int64]) -> None:
        """Count a batch: its answers by the numbers of the samples in it, in order; all its labels and sample ids."""

    def _note(self, _model: nn.Module, _positional: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if logits is not None:
            self._answers.update(zip(self._position.samples, self._answers_of(logits.detach()).cpu(), strict=True))
