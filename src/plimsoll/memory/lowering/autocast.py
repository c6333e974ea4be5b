"""CUDA's autocast for tensors on the CPU.

On a build without CUDA, `torch.autocast("cuda")` does not affect CPU tensors, and `torch.autocast("cpu")` has other
lists of ops. Inside `cuda_autocast_lists`, CPU autocast casts as CUDA's does, and queries about "cuda" autocast return
the state of CPU autocast.

Does NOT know which tensors a program for CUDA would keep on the CPU, and casts them too. Functions of torch that were
imported by name earlier are not replaced, nor is a `torch.autocast("cuda")` object created earlier. The dispatch tables
belong to the process: nothing else may use CPU autocast meanwhile. A nested context has no effect.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.library import Library, fallthrough_kernel

from plimsoll.errors import DeviceError
from plimsoll.memory.lowering.base import kernels_replaced

Policy = Literal["lower_precision", "fp32", "fp32_set_opt_dtype", "fp32_append_dtype", "promote", "banned", "recurrent"]

_LISTS: dict[str, Policy] = {
    "LOWER_PRECISION_FP": "lower_precision",
    "FP32": "fp32",
    "FP32_SET_OPT_DTYPE": "fp32_set_opt_dtype",
    "DIFFERENT_REDISPATCH_SIGNATURE": "fp32_append_dtype",
    "PROMOTE": "promote",
}
# Added to the lists of the header by TORCH_LIBRARY_IMPL(aten, Autocast, m) in aten/src/ATen/autocast_mode.cpp.
_BESIDE_THE_LISTS: dict[str, Policy] = {
    "cudnn_convolution": "lower_precision",
    "cudnn_convolution_transpose": "lower_precision",
    "binary_cross_entropy": "banned",
}
# On CUDA, the cast is inside `_cudnn_rnn`, which these call and which does not exist on the CPU.
_RECURRENT = [f"{cell}.{form}" for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")]
RECURRENT_DTYPE = torch.float16

_BANNED = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)
_KEY = "AutocastCPU"


@contextmanager
def cuda_autocast_lists() -> Iterator[None]:
    """Make CPU autocast behave like CUDA's, and answer queries about CUDA's, until the context exits.

    Raises:
        DeviceError: if the installed torch lacks required functions.
    """
    _check_this_torch()
    if _casts.active:
        yield
        return
    with kernels_replaced(dict(_kernels()), [_KEY]), ExitStack() as undo:
        undo.callback(_casts.end)
        _casts.active = True
        _answer_for_cuda(undo)
        yield


def cast_to_lower_precision(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return tensors cast as by an op of the lower-precision list; unchanged outside an autocast region.

    ``None`` stands for an absent tensor and stays ``None``.
    """
    if not (_casts.active and torch.is_autocast_enabled("cpu")):
        return list(tensors)
    return [_cast(tensor, torch.get_autocast_dtype("cpu")) for tensor in tensors]


@cache
def cuda_policies() -> dict[str, Policy]:
    """Return the policy of CUDA's autocast for each op, by the op's name without ``aten::``.

    Raises:
        DeviceError: if the header that lists the ops is missing from the installed torch.
    """
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    if not header.is_file():
        raise DeviceError(
            f"autocast: torch {torch.__version__} lacks the file include/ATen/autocast_mode.h with its lists of ops: "
            "install torch from a wheel of PyPI or download.pytorch.org"
        )
    text = header.read_text(encoding="utf-8")
    policies = dict(_BESIDE_THE_LISTS)
    for macro, policy in _LISTS.items():
        # Lines that end in a backslash belong to one definition.
        found = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*\n)", text)
        body = found[1] if found else ""
        if policy == "fp32_append_dtype":
            names = re.findall(r'"([\w.]+)"', body)
        else:
            names = [".".join(part.split(", ")) for part in re.findall(r"_\((\w+(?:, \w+)?)\)", body)]
        if not names:
            raise DeviceError(
                f"autocast: AT_FORALL_{macro} in {header.name} of torch {torch.__version__} names no ops, so its "
                "format is unknown: use torch 2.11 to 2.13"
            )
        policies |= dict.fromkeys(names, policy)
    return policies


def _kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield all kernels for CPU autocast: CUDA's, and fallthrough for ops that only CPU autocast casts."""
    policies = cuda_policies() | dict.fromkeys(_RECURRENT, "recurrent")
    for name in policies:
        if (operator := _operator(name)) is not None:
            yield name, partial(_run, policies[name], operator)
    # The name of a dispatch table; torch has no public function to list its kernels.
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(_KEY):
        if (name := qualified.removeprefix("aten::")) not in policies and qualified.startswith("aten::"):
            yield name, fallthrough_kernel


def _operator(name: str) -> Any:
    """Return an op of ``torch.ops.aten``; ``None`` if this version does not have it."""
    base, _, overload = name.partition(".")
    with suppress(AttributeError):
        return getattr(getattr(torch.ops.aten, base), overload or "default")
    return None


def _run(policy: Policy, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op with the casts of its policy, as `WrapFunction_` and, for RNNs, `_cudnn_rnn_cast_reflatten` do."""
    # Private names that torch.library.register_autocast uses, too: inside this guard, ops are not cast again.
    below = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
    # As in C++, neither a TorchFunctionMode nor a Tensor subclass sees the casts.
    with below, torch._C.DisableTorchFunction():
        if policy == "banned":
            raise RuntimeError(_BANNED)
        if policy == "fp32_append_dtype":
            dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
            form = "ScalarOpt_dtype" if operator._overloadname == "Scalar" else "ScalarOpt_dim_dtype"
            if (
                form == "ScalarOpt_dim_dtype" and len(args) < 4
            ):  # keepdim, which has no default in the overload with a dtype
                args = (*args, kwargs.pop("keepdim", False))
            elif form == "ScalarOpt_dtype" and len(args) < 2:
                args = (*args, 2)
            return getattr(torch.ops.aten.norm, form)(*args, **kwargs, dtype=dtype)
        if policy == "fp32_set_opt_dtype":
            if _eligible(args[0]):
                args, kwargs = _with_dtype(operator, args, kwargs)
            return operator(*args, **kwargs)
        if policy == "recurrent":
            # As in ATen/cudnn/AutocastRNN.cpp: float16 regardless of the region's dtype, and weights copied at every
            # call.
            args = _with_weights_in_one_buffer(args)
            cast = partial(_cast, dtype=RECURRENT_DTYPE, may_keep=False)
        else:
            cast = partial(_cast, dtype=_dtype_of(policy, [*args, *kwargs.values()]))
        # From last to first, the order in which the compiler of torch's wheels evaluates arguments.
        given = [_each(cast, value) for value in reversed([*args, *kwargs.values()])][::-1]
        return operator(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))


def _with_weights_in_one_buffer(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a recurrent op with cast weights; the weights are the last list of tensors."""
    place = max(index for index, value in enumerate(args) if isinstance(value, list | tuple))
    weights = args[place]
    if not all(map(_eligible, weights)) or weights[0].dtype == RECURRENT_DTYPE:
        return args
    return (*args[:place], list(_IntoOneBuffer.apply(*weights)), *args[place + 1 :])  # type: ignore[no-untyped-call]


class _IntoOneBuffer(torch.autograd.Function):
    """Copies of weights in half precision, adjacent in one buffer."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtype = weights[0].dtype
        counts = [weight.numel() for weight in weights]
        parts = torch.split(weights[0].new_zeros(sum(counts), dtype=RECURRENT_DTYPE), counts)
        return tuple(part.view(weight.shape).copy_(weight) for weight, part in zip(weights, parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(grad.to(ctx.dtype) for grad in grads)


def _dtype_of(policy: Policy, values: Iterable[Any]) -> torch.dtype:
    if policy == "fp32":
        return torch.float32
    lower = torch.get_autocast_dtype("cpu")
    if policy == "lower_precision":
        return lower
    widest = lower
    for value in values:
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if not _eligible(tensor):
                continue
            if tensor.dtype not in (torch.float32, lower):
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
            widest = torch.float32 if torch.float32 in (tensor.dtype, widest) else lower
    return widest


def _with_dtype(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `dtype` set to fp32, unless another dtype was given."""
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    place = names.index("dtype") if "dtype" in names else len(args)
    if place < len(args):
        return ((*args[:place], args[place] or torch.float32, *args[place + 1 :]), kwargs)
    return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}


def _each(cast: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return cast(value)
    if isinstance(value, list | tuple):
        return type(value)(_each(cast, one) for one in value)
    return value


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


class _Casts:
    """Cache of cast weights for the current autocast region (`cached_casts` of ``autocast_mode.cpp``)."""

    def __init__(self) -> None:
        self.active = False
        # By id, with a weak reference that detects a new parameter at the same address.
        self.kept: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def end(self) -> None:
        self.active = False
        self.kept.clear()


_casts = _Casts()


def _cast(tensor: Any, dtype: torch.dtype, may_keep: bool = True) -> Any:
    """Return a tensor cast to ``dtype``; with ``may_keep``, the cast of a float32 parameter is cached.

    Follows `cached_cast`, without its exception for CUDA graphs.
    """
    if not _eligible(tensor) or tensor.dtype == dtype:
        return tensor
    keep = (
        may_keep
        and dtype == torch.get_autocast_dtype("cpu")
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )
    known = _casts.kept.get(id(tensor)) if keep else None
    if known is not None and known[0]() is tensor:
        return known[1]
    cast = torch.ops.aten.to.dtype(tensor, dtype)
    if keep:
        _casts.kept[id(tensor)] = weakref.ref(tensor), cast
    return cast


def _answer_for_cuda(undo: ExitStack) -> None:
    """Redirect queries about "cuda" autocast to CPU autocast, and start with the dtype set for "cuda"."""

    def replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, by)

    def here(device: str) -> str:
        return "cpu" if device == "cuda" else device

    asked, told = torch.is_autocast_enabled, torch.set_autocast_enabled
    get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
    undo.callback(set_dtype, "cpu", get_dtype("cpu"))
    set_dtype("cpu", get_dtype("cuda"))
    replace(torch, "is_autocast_enabled", lambda device_type="cuda": asked(here(device_type)))
    replace(torch, "get_autocast_dtype", lambda device_type: get_dtype(here(device_type)))
    replace(torch, "set_autocast_dtype", lambda device_type, dtype: set_dtype(here(device_type), dtype))
    replace(torch, "set_autocast_enabled", lambda *given: told(here(given[0] if given[1:] else "cuda"), given[-1]))
    replace(torch, "get_autocast_gpu_dtype", lambda: get_dtype("cpu"))
    replace(torch, "set_autocast_gpu_dtype", lambda dtype: set_dtype("cpu", dtype))

    # Otherwise a GradScaler for "cuda" warns, and neither scales nor checks gradients.
    replace(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)

    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _casts.kept.clear()
        clear()

    replace(torch, "clear_autocast_cache", clear_both)  # called at the end of an outermost region
    region = torch.amp.autocast_mode.autocast
    begin = region.__init__

    def begin_here(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, here(device_type), *args, **kwargs)

    replace(region, "__init__", begin_here)
    # custom_fwd(cast_inputs=...) casts its arguments with this function, by the device in the decorator.
    cast_inputs = torch.amp.autocast_mode._cast
    replace(
        torch.amp.autocast_mode, "_cast", lambda value, device_type, dtype: cast_inputs(value, here(device_type), dtype)
    )


def _check_this_torch() -> None:
    needed = {
        "torch._C": (
            torch._C,
            (
                "_ExcludeDispatchKeyGuard",
                "DispatchKeySet",
                "DispatchKey",
                "_dispatch_get_registrations_for_dispatch_key",
                "DisableTorchFunction",
            ),
        ),
        "torch.library.Library": (Library, ("_destroy", "impl")),
        "torch.amp.autocast_mode": (torch.amp.autocast_mode, ("_cast", "autocast")),
    }
    for owner, (where, names) in needed.items():
        if missing := [name for name in names if not hasattr(where, name)]:
            raise DeviceError(
                f"autocast: {owner} of torch {torch.__version__} has no {', '.join(missing)}, which is needed to "
                "emulate CUDA's autocast on a CPU: use torch 2.11 to 2.13"
            )
