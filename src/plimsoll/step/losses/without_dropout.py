"""Forward passes without dropout in a model that stays in training mode, and detection of other randomness.

Models apply dropout through modules and functions, and a loss may have terms only in training mode. So the flags of
modules stay unchanged, and the dropout functions are disabled instead, also in attention and recurrent layers. Other
random draws (negatives, noise, masks) are detected because they advance the random state. A single number drawn for a
whole layer (layer drop) is not detected, because the random state is restored after the draw.

Not handled: dropout that a program implements itself, or inside a compiled or fused kernel. It is detected as random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPS: set[Callable[..., Any]] = {
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout,
    torch.feature_alpha_dropout,
}  # fmt: skip
_ATTENTIONS = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}
"""Functions with an argument ``dropout_p``, and the position of this argument."""

_MEANS = {functional.cross_entropy: 6, functional.nll_loss: 6}
"""Functions that average over class weights if these are given, and the position of the argument ``reduction``."""


class Undropped(TorchFunctionMode):
    """A mode that disables dropout in functions. It records autocast's dtypes, and whether a loss has class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.averages_weights = False
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` without its dropout."""
        options = dict(kwargs or {})
        if func in _DROPS:
            return args[0] if args else options["input"]
        if func in _ATTENTIONS:
            place = _ATTENTIONS[func]
            args, options = args[:place], options | {"dropout_p": 0.0} | _named(func, place, args)
        if func in _MEANS:
            self.averages_weights |= _averages_weights(func, args, options)
        if func is torch.rand and _is_one(args, options):
            with torch.random.fork_rng(devices=[]):
                return func(*args, **options)
        return self._noted(func(*args, **options))

    def _noted(self, result: Any) -> Any:
        if isinstance(result, Tensor) and torch.is_autocast_enabled(result.device.type):
            self.dtypes.add(torch.get_autocast_dtype(result.device.type))
        return result


@contextmanager
def undropped(model: nn.Module) -> Iterator[Undropped]:
    """Disable dropout and TF32, and make BatchNorm use its running statistics, inside the block."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase) and module.dropout]
    dropped = [layer.dropout for layer in layers]
    norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training]
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for layer in layers:
            layer.dropout = 0.0
        for norm in norms:
            norm.training = False
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        with Undropped() as mode:
            yield mode
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
        for norm in norms:
            norm.training = True
        for layer, share in zip(layers, dropped, strict=True):
            layer.dropout = share


_AFTER_DROPOUT: dict[Any, tuple[str, ...]] = {
    functional.scaled_dot_product_attention: ("is_causal", "scale", "enable_gqa"),
    functional.multi_head_attention_forward: ("out_proj_weight", "out_proj_bias", "training", "key_padding_mask",
        "need_weights", "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight",
        "static_k", "static_v", "average_attn_weights", "is_causal"),
}  # fmt: skip


def _named(func: Any, place: int, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return those positional arguments in ``args`` that follow the dropout argument at index ``place``, by name."""
    return dict(zip(_AFTER_DROPOUT[func], args[place + 1 :], strict=False))


def _averages_weights(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    weight = args[2] if len(args) > 2 else options.get("weight")
    place = _MEANS[func]
    reduction = args[place] if len(args) > place else options.get("reduction", "mean")
    return isinstance(weight, Tensor) and reduction == "mean" and bool((weight != weight.flatten()[0]).any())


def _is_one(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    sizes = options.get("size", args)
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple | torch.Size) else sizes
    return "generator" not in options and all(size == 1 for size in sizes)
