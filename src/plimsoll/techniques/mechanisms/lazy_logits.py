"""Lazy logits: a tensor with the shape of a linear layer's output, whose values are computed only on demand.

A `LazyLogits` has shape, dtype, device and gradient function, but no memory. Operations that losses apply to logits
before ``F.cross_entropy`` are recorded or applied to the layer's input instead. These are slices, reshapes and
permutations of the dimensions before the vocabulary, casts to a wider type, multiplication by a number, and ``detach``.
The cross entropy itself is computed in chunks of tokens. Any other operation computes the real logits once, with their
graph: result and memory are then the same as without this module.

Refused with an error: an in-place change of logits, or a hook on their gradient, after other tensors were derived from
them; and reading logits after the layer's weight or input has changed, for example by an optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from plimsoll.errors import InputError
from plimsoll.techniques.mechanisms.chunked_cross_entropy import Layer, LossOptions, chunked_cross_entropy


@dataclass(frozen=True)
class Form:
    """The operations between layer and logits: a product in ``compute_dtype``, a cast to ``dtype``, a factor ``scale``.

    ``class_dim`` is the dimension of the logits that runs over the vocabulary; in the layer's output it is the last.
    """

    compute_dtype: torch.dtype
    dtype: torch.dtype
    class_dim: int
    scale: float = 1.0


@dataclass
class Tally:
    """The number of chunked cross entropies of one output layer (the head).

    ``asked_by``: the name of the first function that needed all logits; ``None``: no function needed them.
    """

    num_chunked: int = 0
    asked_by: str | None = None


@dataclass
class _Family:
    """State shared by all logits of one call of the head.

    ``made_of``: the tensors that the logits are computed from, and their versions at the call. ``num_members``: the
    number of lazy logits derived from the call.
    """

    chunk_tokens: int
    tally: Tally
    made_of: list[tuple[Tensor, int]] = field(default_factory=list)
    num_members: int = 0


def lazy_linear(head: nn.Linear, hidden: Tensor, chunk_tokens: int, tally: Tally) -> Tensor:
    """Return the logits of a linear layer: lazy if possible, otherwise computed.

    Args:
        head: the layer, with a weight (V, D).
        hidden: the input of the layer, (..., D).
        chunk_tokens: tokens per chunk of the cross entropy.
        tally: counts the chunked cross entropies.

    Returns:
        logits (..., V).
    """
    layer = Layer(hidden, head.weight, head.bias)
    kind = hidden.device.type
    is_autocast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if is_autocast else hidden.dtype
    is_usual = (
        not isinstance(hidden, LazyLogits)
        and hidden.is_floating_point()
        and hidden.shape[-1:] == head.weight.shape[1:]
        and all(tensor is None or tensor.device == hidden.device for tensor in layer)
        and (is_autocast or all(tensor is None or tensor.dtype == hidden.dtype for tensor in layer))
    )
    if not is_usual:
        return functional.linear(*layer)
    family = _Family(chunk_tokens, tally)
    family.made_of = [
        (tensor.detach(), tensor._version) for tensor in layer if tensor is not None and not tensor.is_inference()
    ]  # a detached tensor shares the version counter but keeps no graph alive
    return _lazy(layer, Form(dtype, dtype, hidden.ndim - 1), family)


class LazyLogits(Tensor):
    """Logits that are computed only on demand, created by `lazy_linear`; see the module's docstring."""

    layer: Layer
    form: Form
    family: _Family
    computed: Tensor | None
    is_computed_for_good: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function without computing the logits if that is possible."""
        kwargs = kwargs or {}
        if func in _ASKED_OF_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lazy = args[0] if args and isinstance(args[0], LazyLogits) else None
        if lazy is not None and _may_stay_lazy(lazy, func):
            answer = _STAYS_LAZY[func](*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        name = getattr(func, "__name__", str(func))
        if _binds(name, kwargs):
            tree_map_only(LazyLogits, lambda one: _compute_for_good(one, name), (args, kwargs))
        args, kwargs = tree_map_only(LazyLogits, lambda one: _computed(one, name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has a function that is switched off
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the logits for ops that bypass ``__torch_function__``, such as calls inside another library."""
        if func._schema.is_mutable:
            raise InputError(
                f"cannot let {func} change logits that are not computed: leave chunked_loss out (--forbid chunked_loss)"
            )
        with torch.no_grad():
            values = tree_map_only(LazyLogits, lambda one: _computed(one, str(func)).detach(), (args, kwargs or {}))
            return func(*values[0], **values[1])


class _Node(torch.autograd.Function):
    """The node of lazy logits in autograd's graph.

    Usually no gradient reaches it in backward, because the chunked cross entropy bypasses it.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, form = inputs
        ctx.layer, ctx.form = Layer(*tensors), form
        hidden, weight = ctx.layer[:2]
        shape = list(hidden.shape[:-1])
        shape.insert(form.class_dim, weight.shape[0])
        return Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=form.dtype, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                f"cannot differentiate logits {list(arriving.shape)} of the chunked loss twice, with "
                "create_graph=True: leave chunked_loss out (--forbid chunked_loss)"
            )
        inputs = ctx.layer.map(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
        with torch.enable_grad():
            logits = _logits(inputs, ctx.form)
        wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        gradients = iter(torch.autograd.grad(logits, wanted, arriving))
        return (*(next(gradients) if needs else None for needs in ctx.needs_input_grad[:3]), None)


def _lazy(layer: Layer, form: Form, family: _Family) -> LazyLogits:
    if not torch.is_grad_enabled():
        layer = layer.map(Tensor.detach)
    lazy: LazyLogits = _Node.apply(*layer, form)  # type: ignore[no-untyped-call]
    lazy.layer, lazy.form, lazy.family = layer, form, family
    lazy.computed, lazy.is_computed_for_good = None, False
    family.num_members += 1
    return lazy


def _logits(layer: Layer, form: Form) -> Tensor:
    with torch.autocast(layer.hidden_ND.device.type, enabled=False):
        logits = functional.linear(*layer.map(lambda tensor: tensor.to(form.compute_dtype)))
        logits = logits.to(form.dtype)
        if form.scale != 1:
            logits = logits * form.scale
        return logits if form.class_dim == logits.ndim - 1 else logits.movedim(-1, form.class_dim)


def _may_stay_lazy(lazy: LazyLogits, func: Any) -> bool:
    # With gradients disabled, we may be inside an autograd function, whose graph we cannot see.
    is_inside = lazy.requires_grad and not torch.is_grad_enabled() and func is not functional.cross_entropy
    return func in _STAYS_LAZY and not is_inside and not lazy.is_computed_for_good


def _computed(lazy: LazyLogits, name: str) -> Tensor:
    """Return the real logits, which the function ``name`` needs. They are cached.

    Cached logits without a graph are recomputed if the function needs a graph.
    """
    lacks_graph = lazy.computed is not None and _has_graph(lazy) and not lazy.computed.requires_grad
    if lazy.computed is None or (lacks_graph and torch.is_grad_enabled()):
        _check_unchanged(lazy)
        if torch.is_grad_enabled():
            lazy.family.tally.asked_by = lazy.family.tally.asked_by or name
        lazy.computed = _logits(lazy.layer, lazy.form)
    return lazy.computed


def _has_graph(lazy: LazyLogits) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in lazy.layer)


def _compute_for_good(lazy: LazyLogits, name: str) -> None:
    if not lazy.is_computed_for_good and lazy.family.num_members > 1:
        raise InputError(
            f"cannot call `{name}` on logits of the chunked loss, because tensors that were derived from them before "
            "would miss the change: call it before deriving them, or leave chunked_loss out (--forbid chunked_loss)"
        )
    _computed(lazy, name)
    lazy.is_computed_for_good = True


def _check_unchanged(lazy: LazyLogits) -> None:
    if any(tensor._version != version for tensor, version in lazy.family.made_of):
        raise InputError(
            f"cannot compute the logits {list(lazy.shape)} of the chunked loss any more, because the head's weight or "
            "its input has been changed since: use them before the optimizer's step, or leave chunked_loss out "
            "(--forbid chunked_loss)"
        )


def _binds(name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether a function changes its operands in place or attaches state, such as a hook, to them."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or kwargs.get("out") is not None or name in _BINDING


_BINDING = {
    "__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__",
    "__ipow__", "__imod__", "retain_grad", "register_hook",
}  # fmt: skip


# -- operations on the layer's input -----------------------------------------------------------------------------------


def _with_hidden(lazy: LazyLogits, hidden: Tensor, form: Form) -> Tensor:
    return _lazy(lazy.layer._replace(hidden_ND=hidden), form, lazy.family)


def _has_classes_last(lazy: LazyLogits) -> bool:
    return lazy.form.class_dim == lazy.ndim - 1


def _reshape(lazy: LazyLogits, *given: Any, **named: Any) -> Any:
    sizes: Any = named.get("shape", named.get("size", given))
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = sizes[0]
    if isinstance(sizes, torch.dtype) or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    known = math.prod(size for size in sizes if size != -1)
    sizes = [lazy.numel() // max(known, 1) if size == -1 else size for size in sizes]
    num_outputs = lazy.shape[-1]
    if not _has_classes_last(lazy) or sizes[-1] != num_outputs or math.prod(sizes) != lazy.numel():
        return NotImplemented
    hidden = lazy.layer.hidden_ND
    form = replace(lazy.form, class_dim=len(sizes) - 1)
    return _with_hidden(lazy, hidden.reshape(*sizes[:-1], hidden.shape[-1]), form)


def _flatten(lazy: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % lazy.ndim, end_dim % lazy.ndim
    joined = math.prod(lazy.shape[start : end + 1])
    return _reshape(lazy, [*lazy.shape[:start], joined, *lazy.shape[end + 1 :]])


def _permute(lazy: LazyLogits, *dims: Any) -> Any:
    if len(dims) == 1 and not isinstance(dims[0], int):
        dims = tuple(dims[0])
    order = [dim % lazy.ndim for dim in dims]
    if sorted(order) != list(range(lazy.ndim)):
        return NotImplemented
    inner = [dim for dim in range(lazy.ndim) if dim != lazy.form.class_dim]
    moved = [inner.index(dim) for dim in order if dim != lazy.form.class_dim]
    form = replace(lazy.form, class_dim=order.index(lazy.form.class_dim))
    return _with_hidden(lazy, lazy.layer.hidden_ND.permute(*moved, lazy.ndim - 1), form)


def _transpose(lazy: LazyLogits, dim0: int, dim1: int) -> Any:
    order = list(range(lazy.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(lazy, order)


def _movedim(lazy: LazyLogits, source: Any, destination: Any) -> Any:
    if not isinstance(source, int) or not isinstance(destination, int):
        return NotImplemented
    order = list(range(lazy.ndim))
    order.insert(destination % lazy.ndim, order.pop(source))
    return _permute(lazy, order)


def _index(lazy: LazyLogits, key: Any) -> Any:
    """Select tokens by an index that keeps the whole vocabulary."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if not _has_classes_last(lazy) or not all(map(_is_plain_key, keys)):
        return NotImplemented
    places = [place for place, one in enumerate(keys) if one is Ellipsis]
    num_left = lazy.ndim - sum(map(_num_dims_taken, keys))
    place = places[0] if places else len(keys)
    keys[place : place + 1] = [slice(None)] * num_left
    last = keys[-1]
    if num_left < 0 or not isinstance(last, slice) or last.indices(lazy.shape[-1]) != (0, lazy.shape[-1], 1):
        return NotImplemented
    hidden = lazy.layer.hidden_ND[(*keys[:-1], slice(None))]
    return _with_hidden(lazy, hidden, replace(lazy.form, class_dim=hidden.ndim - 1))


def _is_plain_key(key: Any) -> bool:
    if isinstance(key, Tensor):
        return not isinstance(key, LazyLogits) and key.dtype != torch.uint8
    return key is None or key is Ellipsis or (isinstance(key, int | slice) and not isinstance(key, bool))


def _num_dims_taken(key: Any) -> int:
    if key is None or key is Ellipsis:
        return 0
    return key.ndim if isinstance(key, Tensor) and key.dtype == torch.bool else 1


def _as_it_is(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return lazy


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda lazy, **kwargs: _to(lazy, dtype)


def _to(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Cast to a wider dtype; return ``NotImplemented`` for other dtypes and devices."""
    wanted: dict[str, Any] = {"dtype": lazy.dtype, "device": lazy.device} | kwargs
    for value in args:
        if isinstance(value, torch.dtype):
            wanted["dtype"] = value
        elif isinstance(value, str | torch.device):
            wanted["device"] = value
        elif isinstance(value, Tensor):
            wanted["dtype"], wanted["device"] = value.dtype, value.device
        elif not isinstance(value, bool):  # non_blocking and copy
            return NotImplemented
    dtype, device = wanted["dtype"] or lazy.dtype, torch.device(wanted["device"] or lazy.device)
    is_here = device.type == lazy.device.type and device.index in (None, lazy.device.index)
    if not is_here or torch.promote_types(dtype, lazy.dtype) != dtype or not dtype.is_floating_point:
        return NotImplemented
    return lazy if dtype == lazy.dtype else _with_hidden(lazy, lazy.layer.hidden_ND, replace(lazy.form, dtype=dtype))


def _multiply(lazy: LazyLogits, factor: Any) -> Any:
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        return NotImplemented
    return _with_hidden(lazy, lazy.layer.hidden_ND, replace(lazy.form, scale=lazy.form.scale * factor))


def _divide(lazy: LazyLogits, divisor: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs or isinstance(divisor, Tensor) or divisor == 0 else _multiply(lazy, 1 / divisor)


def _detach(lazy: LazyLogits) -> Any:
    return _lazy(lazy.layer.map(Tensor.detach), lazy.form, lazy.family)


def _cross_entropy(  # noqa: PLR0917 -- torch's signature
    lazy: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    tokens_shape = [size for dim, size in enumerate(lazy.shape) if dim != lazy.form.class_dim]
    is_usual = (
        weight is size_average is reduce is None
        and type(lazy) is not type(target)
        and lazy.form.class_dim == 1
        and target.dtype == torch.int64
        and list(target.shape) == tokens_shape
        and target.device == lazy.device
        and reduction in ("mean", "sum", "none")
    )
    if not is_usual:
        return NotImplemented
    _check_unchanged(lazy)
    lazy.family.tally.num_chunked += 1
    is_autocast = torch.is_autocast_enabled(lazy.device.type)
    options = LossOptions(
        chunk_tokens=lazy.family.chunk_tokens,
        compute_dtype=lazy.form.compute_dtype,
        dtype=lazy.dtype,
        loss_dtype=torch.promote_types(lazy.dtype, torch.float32) if is_autocast else lazy.dtype,
        reduction=reduction,  # type: ignore[arg-type]
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        scale=lazy.form.scale,
    )
    hidden = lazy.layer.hidden_ND
    layer = lazy.layer._replace(hidden_ND=hidden.reshape(-1, hidden.shape[-1]))
    loss = chunked_cross_entropy(layer, target.reshape(-1), options)
    return loss.reshape(target.shape) if reduction == "none" else loss


_STAYS_LAZY: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _index,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.permute: _permute,
    torch.permute: _permute,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.swapaxes: _transpose,
    torch.swapaxes: _transpose,
    Tensor.movedim: _movedim,
    torch.movedim: _movedim,
    Tensor.contiguous: _as_it_is,
    Tensor.float: _cast(torch.float32),
    Tensor.double: _cast(torch.float64),
    Tensor.to: _to,
    Tensor.mul: _multiply,
    Tensor.__mul__: _multiply,
    Tensor.__rmul__: _multiply,
    torch.mul: _multiply,
    Tensor.div: _divide,
    Tensor.__truediv__: _divide,
    torch.div: _divide,
    Tensor.detach: _detach,
}

_SHAPE_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "is_mps",
    "is_xpu",
    "is_leaf",
    "grad_fn",
    "itemsize",
)
_ASKED_OF_THE_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in _SHAPE_PROPERTIES),
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel, Tensor.is_floating_point,
    torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.element_size, Tensor.get_device,
    Tensor.__len__, Tensor.is_inference, torch.is_inference, Tensor.__hash__,
}  # fmt: skip
