"""One prediction per text from the predictions for its windows, in one pass over batches in any order.

Windows of a text are counted, so the memory for a text is freed with its last window. If windows arrive in order, at
most the texts of one batch are held. Sums are in fp64. Not handled: weights per window, predictions per token.

Shapes: B windows of a batch, L classes, D texts that are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TIE_SHARE = 2.0**-32  # of a vote: less than one vote for any number of windows that memory holds

Pooling = Literal["mean", "probability", "max", "vote"]


class WindowPool:
    """An accumulator of window logits that returns a text when all its windows have arrived.

    Args:
        pooling: ``"mean"`` or ``"max"`` of the logits, ``"probability"`` (mean of the probabilities), or ``"vote"``.
            The vote for a class is the share of windows in which it has the largest logit. Mean probability decides
            ties.
        num_of_parents: a function that returns the number of windows of each text, as
            `plimsoll.data.samples.text_windows.Spans.num_of_parents` does.
    """

    def __init__(self, pooling: Pooling, num_of_parents: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> None:
        self._pooling, self._num_of_parents = pooling, num_of_parents
        self._open: dict[int, tuple[Tensor, int]] = {}  # per text: the scores so far, and the number of missing windows

    @property
    def num_open(self) -> int:
        """The number of texts for which some windows have arrived, but not all."""
        return len(self._open)

    def add(self, parents: NDArray[np.int64], logits_BL: Tensor) -> tuple[NDArray[np.int64], Tensor]:
        """Add the logits of some windows. Return the texts whose windows have now all arrived, and their predictions.

        Args:
            parents: the index of the text of each window, (B,) int64.
            logits_BL: the logits of each window.

        Returns:
            the indices of the complete texts in ascending order (D,), and their pooled predictions (D, L) fp64.
        """
        texts, windows, nums_here = np.unique(parents, return_inverse=True, return_counts=True)
        sums = self._gathered(_scores(self._pooling, logits_BL), torch.from_numpy(windows), len(texts))
        done_texts, done_sums = [], []
        nums = self._num_of_parents(texts)
        for row, (text, num, num_here) in enumerate(
            zip(texts.tolist(), nums.tolist(), nums_here.tolist(), strict=True)
        ):
            before, num_missing = self._open.pop(text, (None, num))
            so_far = sums[row] if before is None else self._joined(before, sums[row])
            if num_missing > num_here:
                self._open[text] = so_far.clone(), num_missing - num_here
            else:
                done_texts.append(text)
                done_sums.append(so_far if self._pooling == "max" else so_far / num)
        return np.array(done_texts, np.int64), torch.stack(done_sums) if done_sums else sums[:0]

    def _gathered(self, scores_BL: Tensor, windows_B: Tensor, num_texts: int) -> Tensor:
        index_BL = windows_B[:, None].expand_as(scores_BL)
        start = scores_BL.new_zeros(num_texts, scores_BL.shape[1])
        reduce = "amax" if self._pooling == "max" else "sum"
        return start.scatter_reduce(0, index_BL, scores_BL, reduce, include_self=False)

    def _joined(self, one_L: Tensor, other_L: Tensor) -> Tensor:
        return torch.maximum(one_L, other_L) if self._pooling == "max" else one_L + other_L


def _scores(pooling: Pooling, logits_BL: Tensor) -> Tensor:
    logits_BL = logits_BL.detach().cpu().double()
    if pooling in ("mean", "max"):
        return logits_BL
    probabilities_BL = logits_BL.softmax(dim=1)
    if pooling == "probability":
        return probabilities_BL
    votes_BL = torch.nn.functional.one_hot(logits_BL.argmax(dim=1), logits_BL.shape[1])
    return votes_BL + _TIE_SHARE * probabilities_BL
