"""The accuracy of a classifier, counted while its loss is evaluated (`plimsoll.training.answers`).

Where samples are windows of texts, the answer to a text is the mean of the logits of its windows
(`plimsoll.data.samples.pooling`), and texts are counted. Does NOT cover models that return no ``logits``: of these it
is unknown.

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
    """The share of samples, or of texts, whose largest logit is that of their label; counts while the block runs.

    Args:
        model: returns ``logits`` (B, L).
        position: says which samples of its batch the model is evaluating.
        windows: says of which text each sample is; ``None``: a sample is a text.
        ranks: who share each batch; each of them counts all samples.
    """

    def __init__(
        self, model: nn.Module, position: Position, windows: Windows | None = None, ranks: Ranks | None = None
    ) -> None:
        super().__init__(model, position, ranks)
        self._windows = windows
        self._num_answers = 0
        self._num_right = 0
        self._pool = None if windows is None else WindowPool("mean", windows.num_of_parents)
        self._labels: dict[int, int] = {}  # of texts that are not complete

    def share(self) -> float | None:
        """The accuracy over all batches; ``None`` if the model returned no logits."""
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
