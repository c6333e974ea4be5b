"""The accuracy of a classifier, counted while its loss is evaluated (`plimsoll.training.answers`).

If samples are windows of texts, the logits of the windows are averaged for each text (`plimsoll.data.samples.pooling`).
The accuracy is then the share of texts with a correct prediction. Does NOT handle models that return no ``logits``:
their accuracy is unknown.

Shapes: B samples of a batch, L classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from plimsoll.data.samples.pooling import WindowPool
from plimsoll.distributed.ranks import Ranks
from plimsoll.step.oom_boundary import Position
from plimsoll.training.answers import Answered, Answers, Windows


class Accuracy(Answers):
    """The share of samples, or of texts, whose label has the largest logit, counted inside a ``with`` block.

    Args:
        model: a model that returns ``logits``, (B, L).
        position: holds the indices, in the batch, of the samples that the model is evaluating.
        windows: maps samples to texts; ``None`` if each sample is a text.
        ranks: processes that share each batch; each of them counts all samples.
    """

    def __init__(
        self, model: nn.Module, position: Position, windows: Windows | None = None, ranks: Ranks | None = None
    ) -> None:
        super().__init__(model, position, ranks)
        self._windows = windows
        self._num_answers = 0
        self._num_right = 0
        self._pool = None if windows is None else WindowPool("mean", windows.num_of_parents)
        self._labels: dict[int, int] = {}  # of texts whose windows have not all been seen

    def share(self) -> float | None:
        """Return the accuracy over all batches, from 0 to 1; ``None`` if the model returned no logits."""
        return self._num_right / self._num_answers if self._num_answers else None

    def _answers_of(self, logits_BL: Tensor) -> Tensor:
        return logits_BL.float()

    def _count(self, answered: Sequence[Answered]) -> None:
        logits_BL = torch.stack([one.answer for one in answered])
        labels = [int(one.label) for one in answered]
        if self._windows is not None and self._pool is not None:
            parents = self._windows.parents(np.array([one.sample_id for one in answered]))
            self._labels.update(zip(parents.tolist(), labels, strict=True))
            texts, logits_BL = self._pool.add(parents, logits_BL)
            labels = [self._labels.pop(text) for text in texts.tolist()]
        if labels:
            self._num_answers += len(labels)
            self._num_right += int((logits_BL.argmax(dim=-1) == torch.tensor(labels)).sum())
