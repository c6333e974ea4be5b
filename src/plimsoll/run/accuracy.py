"""The accuracy of a classifier, counted while its loss is evaluated: no second pass over the samples.

A batch that runs out of memory is evaluated once more in smaller pieces. So of a batch only the last answer to each of
its samples counts. Where samples are windows of texts, the answer to a text is the mean of the logits of its windows
(`plimsoll.data.pooling`), and texts are counted. Does NOT cover models that return no ``logits``: of these it is
unknown.

Shapes: B samples of a batch, L classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.data.pooling import WindowPool
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


class Accuracy:
    """The share of samples, or of texts, whose largest logit is that of their label; counts while the block runs.

    Args:
        model: returns ``logits`` (B, L).
        position: says which samples of its batch the model is evaluating.
        windows: says of which text each sample is; ``None``: a sample is a text.
    """

    def __init__(self, model: nn.Module, position: Position, windows: Windows | None = None) -> None:
        self._model, self._position, self._windows = model, position, windows
        self._num_answers = 0
        self._num_right = 0
        self._answers: dict[int, Tensor] = {}  # logits (L,) by the number of the sample in its batch
        self._pool = None if windows is None else WindowPool("mean", windows.num_of_parents)
        self._labels: dict[int, int] = {}  # of texts that are not complete

    def __enter__(self) -> Accuracy:
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
                self._count(batch["labels"], ids[: batch_size_of(batch)])

    def share(self) -> float | None:
        """The accuracy over all batches; ``None`` if the model returned no logits."""
        return self._num_right / self._num_answers if self._num_answers else None

    def _note(self, _model: nn.Module, _positional: Any, output: Any) -> None:
        logits_BL = getattr(output, "logits", None)
        if logits_BL is not None:
            self._answers.update(zip(self._position.samples, logits_BL.detach().float().cpu(), strict=True))

    def _count(self, labels_B: Tensor, ids: NDArray[np.int64]) -> None:
        numbers = sorted(self._answers)
        logits_BL = torch.stack([self._answers[number] for number in numbers])
        labels = labels_B[numbers].tolist()
        if self._windows is not None and self._pool is not None:
            parents = self._windows.parents(ids[numbers])
            self._labels.update(zip(parents.tolist(), labels, strict=True))
            texts, logits_BL = self._pool.add(parents, logits_BL)
            labels = [self._labels.pop(text) for text in texts.tolist()]
        if labels:
            self._num_answers += len(labels)
            self._num_right += int((logits_BL.argmax(dim=-1) == torch.tensor(labels)).sum())
