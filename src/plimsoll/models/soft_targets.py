"""How far a student's distribution is from a teacher's, position by position, and the gradient of it.

Both are softened by a temperature T: p = softmax(teacher / T), q = softmax(student / T); what is computed is the
Kullback-Leibler divergence sum p (log p - log q), and its gradient for the student's logits / T (Hinton et al. 2015,
arXiv:1503.02531, whose factor T squared is the caller's).

`FullTargets` has all of the teacher's logits. `TopTargets` has the k largest log p of each position and treats the
words that are left as one: with the teacher's mass p_r = 1 - sum p and the student's q_r = 1 - sum q it is

    sum over the k: p (log p - log q)  +  p_r (log p_r - log q_r)

and no less than 0; of the words that are left only their sum is learnt, and the gradient leaves their shares among each
other as the student has them. To take the k as if they were all, p / sum p, would teach probabilities that are too
large by that factor, which no amount of data mends (arXiv:2503.16870).

Where the models have different numbers of rows, both distributions are over the tokens both have: what is beyond is no
token of the tokenizer. Everything is computed in float32 or better.

Shapes: B texts, C positions, V vocabulary, k words kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_LEAST_MASS = 1e-12  # of the words that are left: with less, what the k are told decides alone

_LEAST_LOG = -1e4


class SoftTargets(Protocol):
    """What a teacher says of some positions."""

    def compare(self, logits_BCV: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the divergence (B, C) of some positions, and the gradient (B, C, V) for the logits / T.

        The logits are the student's, not softened, in float32 or better; they are not changed.
        """
        ...


@dataclass(frozen=True)
class FullTargets:
    """`SoftTargets` of all of the teacher's logits, which ``logits_of`` makes for some positions."""

    logits_of: Callable[[int, int], Tensor]
    temperature: float

    def compare(self, logits_BCV: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Make the teacher's logits of these positions and let them go."""
        log_p = self.logits_of(begin, end).to(logits_BCV.dtype)
        num_shared = min(log_p.shape[-1], logits_BCV.shape[-1])
        log_p = softened(log_p[..., :num_shared], self.temperature)
        log_q = softened(logits_BCV[..., :num_shared], self.temperature)
        p = log_p.exp()
        divergence_BC = log_p.sub_(log_q).mul_(p).sum(dim=-1)
        del log_p
        return divergence_BC, _widened(log_q.exp_().sub_(p), logits_BCV)


@dataclass(frozen=True)
class TopTargets:
    """`SoftTargets` of the k likeliest words of each position, (B, T, k), and their log p at this temperature."""

    words_BTk: Tensor
    log_p_BTk: Tensor
    temperature: float
    num_words: int

    def compare(self, logits_BCV: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Compare k words and the rest."""
        words = self.words_BTk[:, begin:end].long()
        log_p = self.log_p_BTk[:, begin:end].to(logits_BCV.dtype)
        log_q_all = softened(logits_BCV[..., : self.num_words], self.temperature)
        p, log_q = log_p.exp(), log_q_all.gather(-1, words)
        divergence_BC = (p * (log_p - log_q)).sum(dim=-1)
        rest = log_q_all.scatter(-1, words, -torch.inf)
        gradient = log_q_all.exp_()
        if words.shape[-1] < self.num_words:
            p_rest = (1 - p.sum(dim=-1)).clamp(min=_LEAST_MASS)
            log_q_rest = rest.logsumexp(dim=-1).clamp(min=_LEAST_LOG)  # of a student that is sure to the last bit
            divergence_BC = divergence_BC + p_rest * (p_rest.log() - log_q_rest)
            shares = rest.sub_(log_q_rest.unsqueeze(-1)).exp_()  # of the words that are left, among each other
            gradient.sub_(shares.mul_(p_rest.unsqueeze(-1)))
        return divergence_BC, _widened(gradient.scatter_add_(-1, words, -p), logits_BCV)


def softened(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities at a temperature."""
    return (logits / temperature if temperature != 1 else logits).log_softmax(dim=-1)


def _widened(gradient: Tensor, logits: Tensor) -> Tensor:
    """The gradient, with zeros for rows that only the student has."""
    num_more = logits.shape[-1] - gradient.shape[-1]
    return gradient if num_more == 0 else torch.nn.functional.pad(gradient, (0, num_more))
