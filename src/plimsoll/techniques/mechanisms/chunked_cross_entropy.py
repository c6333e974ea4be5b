"""Cross entropy of a linear layer's outputs in chunks of tokens, without ever storing all logits.

Numerics: matrix products are in ``compute_dtype``, all other operations and sums over chunks in fp32 (fp64 for fp64).
Mathematically it equals ``F.cross_entropy(F.linear(...))``, but it is rounded in another order. No value is read on the
host, not even the number of labels that count, and every op is deterministic.

Not handled: class weights and probabilities as targets. Double backward is refused.

Shapes: N tokens, C tokens per chunk, D features, V outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from plimsoll.errors import InputError

# Rows of a half-precision gradient to add to its fp32 sum at once. This bounds the temporary memory.
_ROWS_PER_SUM = 4096


@dataclass(frozen=True)
class LossOptions:
    """The options of the loss and its computation.

    Attributes:
        chunk_tokens: tokens per chunk.
        compute_dtype: data type of the matrix products.
        dtype: data type of the logits that the model would have returned.
        loss_dtype: data type of the result.
        reduction: ``mean``, ``sum`` or ``none``, as in ``F.cross_entropy``.
        ignore_index: the target of tokens that do not count, as in ``F.cross_entropy``.
        label_smoothing: as in ``F.cross_entropy``.
        scale: the factor by which the logits are multiplied.
    """

    chunk_tokens: int
    compute_dtype: torch.dtype
    dtype: torch.dtype
    loss_dtype: torch.dtype
    reduction: Literal["mean", "sum", "none"] = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    scale: float = 1.0

    @property
    def sum_dtype(self) -> torch.dtype:
        """The data type of the softmax and of all sums."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def recomputes(self) -> bool:
        """True if backward must recompute the chunks, because their gradients depend on the incoming gradient.

        In fp16, small gradients would underflow without the loss scale, which the incoming gradient contains.
        """
        return self.reduction == "none" or self.compute_dtype == torch.float16


class Layer(NamedTuple):
    """A linear layer and its input."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Layer:
        """Apply a function to each tensor; a missing bias stays ``None``."""
        hidden_ND, weight_VD, bias_V = self
        return Layer(function(hidden_ND), function(weight_VD), None if bias_V is None else function(bias_V))


def chunked_cross_entropy(layer: Layer, target_N: Tensor, options: LossOptions) -> Tensor:
    """Return the cross entropy of the logits ``hidden @ weight.T + bias``.

    Args:
        layer: the layer and its input; gradients flow to all its tensors.
        target_N: the target of each token, int64: from 0 to V - 1, or ``ignore_index``.
        options: the options of the loss.

    Returns:
        The loss: a scalar or, with ``reduction="none"``, (N,).

    Raises:
        InputError: in backward, for a second derivative, or for a second backward without ``retain_graph=True``.
    """
    wants_gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in layer)
    if wants_gradients:
        loss: Tensor = _ChunkedCrossEntropy.apply(*layer, target_N, options)  # type: ignore[no-untyped-call]
        return loss
    with torch.no_grad(), _without_autocast(layer):
        return _loss(_Pass(layer, target_N, options).losses(), target_N, options)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss as an autograd function. Forward computes the gradients too, unless `LossOptions.recomputes` is true.

    Backward then only multiplies these gradients by the incoming one, as in Liger (Hsu et al. 2024, arXiv:2410.10989).
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, target_N, options = inputs
        layer = Layer(*tensors)
        ctx.options, ctx.gradients = options, None
        with _without_autocast(layer):
            if options.recomputes:
                ctx.save_for_backward(*layer, target_N)
                return _loss(_Pass(layer, target_N, options).losses(), target_N, options)
            work = _Pass(layer, target_N, options, ctx.needs_input_grad[:3])
            loss_N = work.losses(_shares(target_N, options))
            ctx.gradients = work.sums
            ctx.dtypes = _dtypes(layer)
            return _loss(loss_N, target_N, options)

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                f"cannot differentiate the chunked cross entropy (chunk_tokens {ctx.options.chunk_tokens}) twice, with "
                "create_graph=True, because its gradients are computed without a graph: leave chunked_loss out "
                "(--forbid chunked_loss)"
            )
        if ctx.options.recomputes:
            return (*_recomputed(ctx, arriving), None, None)
        if ctx.gradients is None:
            raise InputError(
                f"cannot run backward through the chunked cross entropy (chunk_tokens {ctx.options.chunk_tokens}) a "
                "second time, because the first backward freed its gradients: pass retain_graph=True to the first "
                "backward"
            )
        return (*_scaled(ctx, arriving), None, None)


def _scaled(ctx: Any, arriving: Tensor) -> Iterator[Tensor | None]:
    """Yield the gradients that forward computed, multiplied by the incoming gradient.

    ``None``: the gradient is not needed. The product is in place if the graph is freed.
    """
    # Private: whether this backward has retain_graph=True. If torch lacks the function, the gradients are copied.
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)()
    sums = ctx.gradients
    if not keeps_graph:
        ctx.gradients = None
    for number, dtype in enumerate(ctx.dtypes):
        if sums[number] is None:
            yield None
            continue
        yield (sums[number] * arriving if keeps_graph else sums[number].mul_(arriving)).to(dtype)
        if not keeps_graph:
            sums[number] = None  # after a cast, this frees the sum before the next one


def _recomputed(ctx: Any, arriving: Tensor) -> Iterator[Tensor | None]:
    *tensors, target_N = ctx.saved_tensors
    layer = Layer(*tensors)
    with _without_autocast(layer):
        work = _Pass(layer, target_N, ctx.options, ctx.needs_input_grad[:3])
        work.losses(_shares(target_N, ctx.options) * arriving)
    for sum_, dtype in zip(work.sums, _dtypes(layer), strict=True):
        yield None if sum_ is None else sum_.to(dtype)


def _dtypes(layer: Layer) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in layer]


def _without_autocast(layer: Layer) -> torch.autocast:
    return torch.autocast(layer.hidden_ND.device.type, enabled=False)


def _loss(loss_N: Tensor, target_N: Tensor, options: LossOptions) -> Tensor:
    if options.reduction == "none":
        return loss_N.to(options.loss_dtype)
    total = loss_N.sum()
    if options.reduction == "mean":  # 0 / 0 without counted labels gives NaN, as in torch
        total = total / (target_N != options.ignore_index).sum()
    return total.to(options.loss_dtype)


def _shares(target_N: Tensor, options: LossOptions) -> Tensor:
    """Return the weight of each token's loss in the result."""
    counts_N = target_N != options.ignore_index
    share_N = counts_N.to(options.sum_dtype)
    return share_N / counts_N.sum().clamp(min=1) if options.reduction == "mean" else share_N


class _Pass:
    """One pass over the chunks, with buffers that all chunks reuse.

    ``sums`` has the gradients of hidden, weight and bias; ``None`` for a gradient that is not requested.
    """

    def __init__(self, layer: Layer, target_N: Tensor, options: LossOptions, wanted: Any = (False,) * 3) -> None:
        self._options = options
        self._ignored_N = target_N == options.ignore_index
        self._target_N = target_N.masked_fill(self._ignored_N, 0)
        self._hidden, self._weight, self._bias = layer.map(lambda tensor: tensor.to(options.compute_dtype))
        self._chunk_tokens = max(1, min(options.chunk_tokens, len(target_N)))
        shape = self._chunk_tokens, len(layer.weight_VD)
        self._product = layer.hidden_ND.new_empty(shape, dtype=options.compute_dtype)
        self._is_mixed = options.compute_dtype != options.sum_dtype
        self._logits = self._product.new_empty(shape, dtype=options.sum_dtype) if self._is_mixed else self._product
        self.sums = [
            torch.zeros_like(tensor, dtype=tensor.dtype if tensor is layer.hidden_ND else options.sum_dtype)
            if tensor is not None and is_wanted
            else None
            for tensor, is_wanted in zip(layer, wanted, strict=True)
        ]

    def losses(self, share_N: Tensor | None = None) -> Tensor:
        """Return the loss of each token (N,).

        With ``share_N``, the weight of each token in the result, also accumulate the gradients in ``sums``.
        """
        loss_N = self._logits.new_empty(len(self._target_N))
        for start in range(0, len(self._target_N), self._chunk_tokens):
            rows = slice(start, start + self._chunk_tokens)
            logits_CV = self._logits_of(rows)
            loss_N[rows], total_C = self._losses_of(logits_CV, self._target_N[rows])
            if share_N is not None:
                self._make_gradient(logits_CV, total_C, self._target_N[rows], share_N[rows] * self._options.scale)
                self._add_gradients(logits_CV, rows)
        return loss_N.masked_fill_(self._ignored_N, 0)

    def _logits_of(self, rows: slice) -> Tensor:
        hidden_CD = self._hidden[rows]
        product_CV, logits_CV = self._product[: len(hidden_CD)], self._logits[: len(hidden_CD)]
        if self._bias is None:
            torch.mm(hidden_CD, self._weight.t(), out=product_CV)
        else:
            torch.addmm(self._bias, hidden_CD, self._weight.t(), out=product_CV)
        if self._is_mixed:
            logits_CV.copy_(product_CV)
        return logits_CV if self._options.scale == 1 else logits_CV.mul_(self._options.scale)

    def _losses_of(self, logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (C,) and the sums of exponentials (C,). Overwrite the logits by their exponentials."""
        logits_CV.sub_(logits_CV.amax(dim=1, keepdim=True))
        picked_C = logits_CV.gather(1, target_C[:, None]).squeeze(1)
        smoothing = self._options.label_smoothing
        mean_C = logits_CV.mean(dim=1) if smoothing else None
        total_C = logits_CV.exp_().sum(dim=1)
        log_total_C = total_C.log()
        loss_C = log_total_C - picked_C
        if mean_C is not None:
            loss_C = torch.lerp(loss_C, log_total_C - mean_C, smoothing)
        return loss_C, total_C

    def _make_gradient(self, exponentials_CV: Tensor, total_C: Tensor, target_C: Tensor, share_C: Tensor) -> None:
        """Overwrite the exponentials (C, V) by the gradient of the logits; ``share_C`` has the tokens' weights."""
        smoothing = self._options.label_smoothing
        exponentials_CV.mul_((share_C / total_C)[:, None])
        if smoothing:
            exponentials_CV.sub_((share_C * (smoothing / exponentials_CV.shape[1]))[:, None])
        exponentials_CV.scatter_add_(1, target_C[:, None], (share_C * (smoothing - 1))[:, None])

    def _add_gradients(self, gradient_CV: Tensor, rows: slice) -> None:
        grad_hidden, grad_weight, grad_bias = self.sums
        if grad_bias is not None:
            grad_bias += gradient_CV.sum(dim=0)
        if self._is_mixed:
            gradient_CV = self._product[: len(gradient_CV)].copy_(gradient_CV)
        if grad_hidden is not None:
            if grad_hidden.dtype == self._weight.dtype:
                torch.mm(gradient_CV, self._weight, out=grad_hidden[rows])
            else:
                grad_hidden[rows] = gradient_CV @ self._weight
        if grad_weight is not None:
            self._add_to_weight(grad_weight, gradient_CV.t(), self._hidden[rows])

    def _add_to_weight(self, sum_VD: Tensor, gradient_VC: Tensor, hidden_CD: Tensor) -> None:
        if not self._is_mixed:
            sum_VD.addmm_(gradient_VC, hidden_CD)
            return
        for sum_part, gradient in zip(
            torch.split(sum_VD, _ROWS_PER_SUM), torch.split(gradient_VC, _ROWS_PER_SUM), strict=True
        ):
            sum_part.add_(gradient @ hidden_CD)
