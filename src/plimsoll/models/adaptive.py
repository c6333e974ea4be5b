"""The adaptive softmax loss (Grave et al. 2017, arXiv:1609.04309), and its default clusters.

Parameters and mathematics equal those in ``torch.nn.AdaptiveLogSoftmaxWithLoss``. Torch's class has no
``ignore_index``, and saves all outputs of a cluster (rows x words) for backward. Here the outputs are computed for a
chunk of rows at a time, and recomputed in backward. A batch of rare words thus needs no more memory than other batches
of its size, and the dry run's prediction holds for every text.

The id of a word decides its cluster: id 0 should be the most frequent word. With other ids the result is still a
softmax over all words, but frequent words have few features and cost more.

Not handled: a bias for rare words, and weights tied to an embedding, which has the same number of features for every
word.

Shapes: B samples, T tokens, N = B * T, C rows of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import AdaptiveLogSoftmaxWithLoss, functional
from torch.utils.checkpoint import checkpoint

from plimsoll.data.batch import IGNORED_LABEL

DIV_VALUE = 4
"""The default of torch and of the paper: each cluster has a quarter of the previous one's features."""

MOST_OUTPUTS = 1 << 22
"""The most outputs (rows x words) of a chunk: 16 MiB in fp32. Outputs, log-probabilities and gradient exist at once."""


def default_cutoffs(vocab_size: int) -> tuple[int, ...]:
    """Return cutoffs at a 25th and a fifth of a vocabulary, such as 2,000 and 10,000 for 50,000 words.

    >>> default_cutoffs(50_000), default_cutoffs(8)
    ((2000, 10000), (1,))
    """
    return tuple(sorted({one for one in (vocab_size // 25, vocab_size // 5) if one}))


def cutoffs_fault(cutoffs: Sequence[int], vocab_size: int, hidden_size: int, div_value: float) -> str | None:
    """Return an error message if the cutoffs are invalid; ``None`` if they are valid.

    Args:
        cutoffs: the id of the first word of each cluster; more frequent words belong to no cluster.
        vocab_size: number of words.
        hidden_size: number of features of the most frequent words.
        div_value: the factor by which each cluster has fewer features than the previous one.
    """
    shown = ", ".join(map(str, cutoffs)) or "none"
    if not cutoffs or list(cutoffs) != sorted(set(cutoffs)) or cutoffs[0] < 1:
        return f"cutoffs are {shown}: give one or more numbers of words, each larger than the one before"
    if cutoffs[-1] >= vocab_size:
        return f"cutoffs are {shown}, but the vocabulary has {vocab_size} words: give smaller ones"
    if hidden_size < div_value ** len(cutoffs):
        return (
            f"{len(cutoffs)} clusters with {div_value:g} times fewer features each leave no feature of {hidden_size} "
            "for the last: give fewer cutoffs or a smaller div_value"
        )
    return None


def adaptive_head(
    hidden_size: int, vocab_size: int, cutoffs: Sequence[int], div_value: float
) -> AdaptiveLogSoftmaxWithLoss:
    """Return a new output layer. Only the outputs for the most frequent words and for the clusters have a bias."""
    return AdaptiveLogSoftmaxWithLoss(hidden_size, vocab_size, cutoffs, div_value, head_bias=True)


def adaptive_loss(
    head: AdaptiveLogSoftmaxWithLoss, hidden_BTH: Tensor, targets_BT: Tensor, reduction: Literal["mean", "sum"]
) -> Tensor:
    """Return the cross entropy for the targets (B, T), in fp32 or better. Targets of -100 do not count.

    In a dry run, the values of the targets must be unknown: they are placeholders, not the words of a text. Every
    target then counts as a member of every cluster. This can only overestimate: the time, because each cluster computes
    all rows, and the memory, because the chunks of the largest cluster are full.

    Every cluster gets gradients in every pass, so that the first step creates all optimizer states.
    """
    hidden_NH, targets_N = hidden_BTH.flatten(0, 1), targets_BT.flatten()
    head_targets_N, losses = targets_N, []
    for number, (tail, (first, end)) in enumerate(zip(head.tail, pairwise(head.cutoffs), strict=True)):
        is_here_N = (targets_N >= first) & (targets_N < end)
        head_targets_N = torch.where(is_here_N, head.shortlist_size + number, head_targets_N)
        rows = is_here_N.nonzero().squeeze(1)
        for rows_C in torch.split(rows, _most_rows(end - first)):
            losses.append(_again_in_backward(tail, hidden_NH, targets_N - first, rows_C))
    most_rows = _most_rows(head.head_size)
    for hidden_CH, targets_C in zip(
        torch.split(hidden_NH, most_rows), torch.split(head_targets_N, most_rows), strict=True
    ):
        losses.append(_again_in_backward(head.head, hidden_CH, targets_C, None))
    total = torch.stack(losses).sum()
    return total if reduction == "sum" else total / (targets_N != IGNORED_LABEL).sum()


def widened(outputs: Tensor) -> Tensor:
    """Return outputs in fp32 or better for the loss. A 16-bit loss would have only two or three digits."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def log_probabilities(head: AdaptiveLogSoftmaxWithLoss, hidden_BTH: Tensor) -> Tensor:
    """Return the log-probability (B, T, V) of every word as the next word, that is, normalised logits."""
    log_probabilities_NV: Tensor = head.log_prob(hidden_BTH.flatten(0, 1))
    return log_probabilities_NV.view(*hidden_BTH.shape[:2], head.n_classes)


def _most_rows(num_words: int) -> int:
    return max(MOST_OUTPUTS // num_words, 1)


def _again_in_backward(layer: nn.Module, hidden_NH: Tensor, targets_N: Tensor, rows_C: Tensor | None) -> Tensor:
    loss: Tensor = checkpoint(
        _summed_loss, layer, hidden_NH, targets_N, rows_C, use_reentrant=False, preserve_rng_state=False
    )
    return loss


def _summed_loss(layer: nn.Module, hidden_NH: Tensor, targets_N: Tensor, rows_C: Tensor | None) -> Tensor:
    """Return the summed loss of the rows ``rows_C``, or of all rows if that is ``None``.

    The rows are selected inside the checkpointed function, so that the copy of the rows is not saved for backward.
    """
    if rows_C is not None:
        hidden_NH, targets_N = hidden_NH.index_select(0, rows_C), targets_N.index_select(0, rows_C)
    outputs = layer(hidden_NH)
    return functional.cross_entropy(widened(outputs), targets_N, ignore_index=IGNORED_LABEL, reduction="sum")
