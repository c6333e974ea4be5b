"""The distillation loss of a language model, computed for a few positions at a time.

For each chunk of positions, the forward pass computes the student's logits, compares them with labels and teacher
(`SoftTargets`), and computes their gradients at once. Backward only multiplies these gradients by the incoming one, as
Liger does for the cross entropy (Hsu et al. 2024, arXiv:2410.10989). Neither model's logits are ever stored for all
positions.

Numerics: matrix products use the autocast dtype. All other operations, and sums over chunks, use float32 (or float64
for float64 inputs).

Double backward and a second backward through the same loss raise an error.

Shapes: B texts, T tokens, P = T - 1 predicted tokens, C positions of a chunk, H hidden size, V vocabulary, k teacher's
words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from plimsoll.data.batch import IGNORED_LABEL
from plimsoll.errors import InputError
from plimsoll.models.head_apart import HeadApart, forward_of

_LEAST_MASS = 1e-12  # lower bound for the probability of all other words, so that its logarithm is finite

_LEAST_LOG = -1e4


class SoftTargets(Protocol):
    """The interface of the teacher's probabilities, and of their comparison with the student's probabilities.

    Both distributions are softened by a temperature T: p = softmax(teacher's logits / T), q = softmax(student's logits
    / T). If one model has more outputs than the other, its additional outputs are left out: they belong to no token.
    """

    def compare(self, logits_BCV: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the divergence (B, C) for a chunk of positions, and its gradient (B, C, V) with respect to logits / T.

        It is the Kullback-Leibler divergence sum p (log p - log q). The caller applies the factor T squared (Hinton et
        al. 2015, arXiv:1503.02531).

        Args:
            logits_BCV: the student's logits, not softened, in float32 or better; they are not changed.
            begin: the first position of the chunk.
            end: the position after the chunk.
        """
        ...


@dataclass(frozen=True)
class FullTargets:
    """`SoftTargets` from the teacher's logits for all words. ``logits_of(begin, end)`` computes a chunk's logits."""

    logits_of: Callable[[int, int], Tensor]
    temperature: float

    def compare(self, logits_BCV: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Compute the teacher's logits at these positions, compare them with the student's, and free them."""
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
    """`SoftTargets` from the k most likely words at each position (B, T, k), with log-probabilities at ``temperature``.

    All other words count as a single word. The teacher gives it the probability p_r = 1 - sum p, and the student q_r =
    1 - sum q. The divergence is

        sum over the k words: p (log p - log q)  +  p_r (log p_r - log q_r)

    and at least 0. The student learns only the total probability of the other words, not the ratios among them.
    Renormalizing the k words to p / sum p instead would teach probabilities that are too large by the factor 1 / sum p.
    More data would not correct this bias (arXiv:2503.16870).
    """

    words_BTk: Tensor
    log_p_BTk: Tensor
    temperature: float
    num_words: int

    def compare(self, logits_BCV: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Compare teacher and student on each of the k words, and on the total of all other words."""
        words = self.words_BTk[:, begin:end].long()
        log_p = self.log_p_BTk[:, begin:end].to(logits_BCV.dtype)
        log_q_all = softened(logits_BCV[..., : self.num_words], self.temperature)
        p, log_q = log_p.exp(), log_q_all.gather(-1, words)
        divergence_BC = (p * (log_p - log_q)).sum(dim=-1)
        rest = log_q_all.scatter(-1, words, -torch.inf)
        gradient = log_q_all.exp_()
        if words.shape[-1] < self.num_words:
            p_rest = (1 - p.sum(dim=-1)).clamp(min=_LEAST_MASS)
            log_q_rest = rest.logsumexp(dim=-1).clamp(
                min=_LEAST_LOG
            )  # the student may give the other words a probability of exactly 0
            divergence_BC = divergence_BC + p_rest * (p_rest.log() - log_q_rest)
            shares = rest.sub_(log_q_rest.unsqueeze(-1)).exp_()  # ratios among the other words
            gradient.sub_(shares.mul_(p_rest.unsqueeze(-1)))
        return divergence_BC, _widened(gradient.scatter_add_(-1, words, -p), logits_BCV)


def softened(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities of logits divided by a temperature."""
    return (logits / temperature if temperature != 1 else logits).log_softmax(dim=-1)


def _widened(gradient: Tensor, logits: Tensor) -> Tensor:
    """Return the gradient padded with zeros for the outputs that only the student has."""
    num_more = logits.shape[-1] - gradient.shape[-1]
    return gradient if num_more == 0 else functional.pad(gradient, (0, num_more))


CHUNK_NUMBERS = 2 << 20
"""The maximum number of logits of a chunk: 8 MiB in float32, of which up to six copies exist at once. A chunk has 41
positions if the vocabulary has 50,000 words."""

_ROWS_PER_SUM = 4096  # rows of a half-precision gradient to add to its float32 sum at once, to bound the temporary


class LossWeights(NamedTuple):
    """The weights of the two losses in their sum.

    The loss from the labels has the weight ``hard``. The divergence from the teacher has the weight (1 - ``hard``) T
    squared, where T is ``temperature``.
    """

    temperature: float
    hard: float


def chunked_distillation(
    student: HeadApart,
    labels_BT: Tensor,
    targets: SoftTargets,
    loss_weights: LossWeights,
    chunk_numbers: int = CHUNK_NUMBERS,
) -> Tensor:
    """Return the distillation loss: the mean over the labels that count.

    Args:
        student: the student's hidden states, with the graph of its body, and its head.
        labels_BT: the label of each token; position t predicts the label at t + 1, and -100 does not count.
        targets: the teacher's probabilities.
        loss_weights: the weights of the loss from the labels and of the divergence.
        chunk_numbers: the maximum number of logits per chunk; a chunk has at least one position of every text.
    """
    work = _Work(student, labels_BT[:, 1:], targets, loss_weights, chunk_numbers)
    loss: Tensor = _Loss.apply(work, student.hidden_BTH, *student.parameters)  # type: ignore[no-untyped-call]
    return loss


class _Loss(torch.autograd.Function):
    """The loss as an autograd function. Its forward already computes the gradients."""

    @staticmethod
    def forward(ctx: Any, work: _Work, hidden_BTH: Tensor, *parameters: Tensor) -> Tensor:
        work.wanted = ctx.needs_input_grad[2:]
        total = work.run()
        ctx.sums = [work.hidden_sum, *work.sums]
        ctx.dtypes = [hidden_BTH.dtype, *(parameter.dtype for parameter in parameters)]
        num_counted = work.counted_BP.sum()
        ctx.num_counted = num_counted.clamp(min=1)
        return total / num_counted  # NaN if no label counts, like cross entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums is None:
            raise InputError(
                f"cannot go backward through the distillation loss {list(arriving.shape)} a second time, because the "
                "first backward freed its gradients: call the loss again"
            )
        sums, ctx.sums = ctx.sums, None
        # Scaled only here: the gradients of the sum are large enough not to underflow in fp16.
        factor = arriving / ctx.num_counted
        scaled: list[Tensor | None] = []
        for number, dtype in enumerate(ctx.dtypes):
            one = sums[number]
            scaled.append(None if one is None else one.mul_(factor).to(dtype))
            sums[number] = None  # frees the sum before the next one if it was cast
        return None, *scaled


class _Work:
    """The computation of the loss and its gradients, in one pass over the chunks.

    ``hidden_sum`` is the gradient of the hidden states. ``sums`` has the gradients of the head's parameters.
    """

    def __init__(
        self, student: HeadApart, targets_BP: Tensor, soft: SoftTargets, loss_weights: LossWeights, chunk_numbers: int
    ) -> None:
        self._student, self._soft, self._loss_weights = student, soft, loss_weights
        self.counted_BP = targets_BP != IGNORED_LABEL
        self._targets_BP = targets_BP.masked_fill(~self.counted_BP, 0)
        self._chunk = max(1, chunk_numbers // (len(targets_BP) * student.num_outputs))
        hidden_BTH = student.hidden_BTH
        self._sum_dtype = torch.promote_types(hidden_BTH.dtype, torch.float32)
        self.hidden_sum: Tensor | None = None
        self.wanted: tuple[bool, ...] = ()
        self.sums: list[Tensor | None] = []

    def run(self) -> Tensor:
        """Compute the gradients chunk by chunk, and return the summed loss."""
        hidden_BTH = self._student.hidden_BTH
        total = torch.zeros((), dtype=self._sum_dtype, device=hidden_BTH.device)
        self.hidden_sum = torch.zeros_like(hidden_BTH, dtype=self._sum_dtype)
        self.sums = [None] * len(self.wanted)
        with self._matrix_summed():
            for begin in range(0, self._targets_BP.shape[1], self._chunk):
                total += self._of_chunk(begin, min(begin + self._chunk, self._targets_BP.shape[1]))
        return total

    def _of_chunk(self, begin: int, end: int) -> Tensor:
        assert self.hidden_sum is not None
        hidden_BCH = self._student.hidden_BTH[:, begin:end].detach().contiguous().requires_grad_()
        numbers = [number for number, is_wanted in enumerate(self.wanted) if is_wanted]
        with torch.enable_grad():
            logits_BCV = self._student.head(hidden_BCH)
        loss, gradient = self._loss_and_gradient(logits_BCV.detach(), begin, end)
        inputs = [hidden_BCH, *(self._student.parameters[number] for number in numbers)]
        with torch.autocast(logits_BCV.device.type, enabled=False):
            found = torch.autograd.grad(logits_BCV, inputs, gradient.to(logits_BCV.dtype), allow_unused=True)
        if found[0] is not None:
            self.hidden_sum[:, begin:end] = found[0]
        for number, one in zip(numbers, found[1:], strict=True):
            if one is not None:
                before = self.sums[number]
                self.sums[number] = one.to(self._sum_dtype) if before is None else before.add_(one)
        return loss

    def _loss_and_gradient(self, logits_BCV: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a chunk, and its gradient (B, C, V) for the logits."""
        counted_BC, (temperature, hard) = self.counted_BP[:, begin:end], self._loss_weights
        logits_BCV = logits_BCV.to(self._sum_dtype)
        losses_BC, gradient = None, None
        if hard < 1:
            losses_BC, gradient = self._soft.compare(logits_BCV, begin, end)
            losses_BC, gradient = losses_BC * ((1 - hard) * temperature**2), gradient.mul_((1 - hard) * temperature)
        if hard > 0:
            targets_BC1 = self._targets_BP[:, begin:end, None]
            log_q = logits_BCV.log_softmax(dim=-1)
            of_labels_BC = log_q.gather(-1, targets_BC1).squeeze(-1).mul_(-hard)
            of_labels = log_q.exp_().mul_(hard)
            of_labels.scatter_add_(-1, targets_BC1, of_labels.new_full((), -hard).expand(targets_BC1.shape))
            losses_BC = of_labels_BC if losses_BC is None else losses_BC.add_(of_labels_BC)
            gradient = of_labels if gradient is None else gradient.add_(of_labels)
        assert losses_BC is not None
        assert gradient is not None
        return losses_BC.masked_fill(~counted_BC, 0).sum(), gradient.masked_fill_(~counted_BC[..., None], 0)

    @contextmanager
    def _matrix_summed(self) -> Iterator[None]:
        """Make the output layer add its weight's gradient of each chunk to one tensor in place, while the block runs.

        A frozen weight gets no gradient.
        """
        layer = self._student.matrix
        places = [number for number, one in enumerate(self._student.parameters) if layer and one is layer.weight]
        if layer is None or not places:
            yield
            return
        place = places[0]
        kind = layer.weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else layer.weight.dtype
        weight = layer.weight.detach().to(dtype)
        total = torch.zeros_like(layer.weight, dtype=self._sum_dtype) if self.wanted[place] else None
        self.sums[place] = total
        product: Any = _Product.apply  # torch has no types for it
        with forward_of(layer, lambda run, inputs: product(inputs.to(dtype), weight, _bias(layer, dtype), total)):
            yield


def _bias(layer: nn.Linear, dtype: torch.dtype) -> Tensor | None:
    return None if layer.bias is None else layer.bias.to(dtype)


class _Product(torch.autograd.Function):
    """``F.linear`` that adds the gradient of its weight to ``sum_VH``, unless ``sum_VH`` is ``None``."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_VH: Tensor, bias_V: Tensor | None, sum_VH: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight_VH)
        ctx.sum_VH, ctx.has_bias = sum_VH, bias_V is not None
        return functional.linear(inputs, weight_VH, bias_V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight_VH = ctx.saved_tensors
        gradient_NV, inputs_NH = gradient.flatten(0, -2), inputs.flatten(0, -2)
        if ctx.sum_VH is not None and gradient.dtype == ctx.sum_VH.dtype:
            ctx.sum_VH.addmm_(gradient_NV.t(), inputs_NH)
        elif ctx.sum_VH is not None:
            parts = (torch.split(whole, _ROWS_PER_SUM) for whole in (ctx.sum_VH, gradient_NV.t()))
            for part, of_rows in zip(*parts, strict=True):
                part.add_(of_rows @ inputs_NH)
        of_bias = gradient_NV.sum(dim=0) if ctx.has_bias else None
        return gradient @ weight_VH, None, of_bias, None
