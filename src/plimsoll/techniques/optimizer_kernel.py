"""The kernel of an optimizer's update in ``torch.optim``: `foreach`, `loop` or `fused`.

- ``foreach`` computes each intermediate for many parameters at once. It is torch's default on CUDA. The temporaries of
  a chunk of the update (see `plimsoll.step.update.commit`) are as large as the chunk.
- ``loop`` computes one parameter after another. It is torch's default on the CPU.
- ``fused`` computes a parameter in one pass without intermediates. Only Adagrad, Adam, AdamW and SGD have it.

Numerics: the same formula, rounded in another order. The step count is on the host for `loop` and `foreach`, and on the
device of the parameter for `fused`. When the kernel changes, the step counts of existing states are moved. A checkpoint
records the original kernel of the training, not the installed one.

Does NOT cover optimizers outside ``torch.optim``, ``differentiable=True``, and states on another device.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from plimsoll.models.optimizers import is_of_torch
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques import technique_of
from plimsoll.techniques.mechanisms.replaced_optimizer import ReplacedOptimizer
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

Kernel = Literal["foreach", "loop", "fused"]
_MISSING = object()
# Attributes that torch sets on a `fused` optimizer, for its gradient scaler and for itself.
_OF_FUSED = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")


class OptimizerKernel(Technique):
    """`Technique`: choose another kernel for the update."""

    name = "optimizer_kernel"
    numerics = "reordered"
    summary = "the optimizer's update in a kernel with fewer temporaries"
    modifies = frozenset({"optimizer"})
    moves = frozenset({"states"})
    reaches = frozenset({"temporaries"})
    only_in = frozenset({"optimizer"})
    works_on_shards = True
    may_be_faster = True
    keeps_state_between_passes = False
    by_hand = "choose the kernel by the optimizer's arguments: foreach=False and fused=True need the fewest temporaries"
    remedies: ClassVar = {"optimizer_temporaries": 0}
    stage = "places"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return a choice of `fused`, which is the fastest and needs the least memory.

        If `fused` is impossible, return a choice of each other kernel that the optimizer does not use yet.
        """
        optimizer = workload.optimizer
        if not is_of_torch(optimizer) or "foreach" not in optimizer.defaults:
            return f"{type(optimizer).__name__} has one kernel only"
        in_force = {kernel_of(group, setting.device) for group in optimizer.param_groups}
        if in_force == {"fused"}:
            return f"{type(optimizer).__name__} uses its `fused` kernel, the fastest with the least memory"
        possible = [kernel for kernel in get_args(Kernel) if _obstacle(kernel, workload, setting.device) is None]
        offered = ["fused"] if "fused" in possible else [kernel for kernel in possible if in_force != {kernel}]
        choices = tuple(Choice(technique=self.name, options={"kernel": kernel}) for kernel in offered)
        return choices or (
            f"{type(optimizer).__name__} uses its `{' and '.join(sorted(in_force))}` kernel, and "
            + " and ".join(
                f"for `{kernel}` {_obstacle(kernel, workload, setting.device)}"
                for kernel in get_args(Kernel)
                if kernel not in in_force
            )
        )

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the optimizer does not have the kernel, or its options do not support it."""
        kernel = choice.options["kernel"]
        if kernel not in get_args(Kernel):
            return f"there is no kernel `{kernel}`: choose foreach, loop or fused"
        techniques = (technique_of(other.technique) for other in others)
        replacing = next((one for one in techniques if isinstance(one, ReplacedOptimizer)), None)
        if replacing is not None and kernel not in replacing.kernels:
            return f"{replacing.name} replaces the optimizer, and the new one has no `{kernel}` kernel to choose"
        return _obstacle(kernel, workload, setting.device)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Set the kernel in every parameter group, and place existing and loaded step counts for it."""
        optimizer, kernel = workload.optimizer, choice.options["kernel"]
        given = [{key: group.get(key, _MISSING) for key in ("foreach", "fused")} for group in optimizer.param_groups]
        defaults: dict[str, Any] = {
            key: optimizer.defaults[key] for key in ("foreach", "fused") if key in optimizer.defaults
        }
        attributes = {name: vars(optimizer).get(name, _MISSING) for name in _OF_FUSED}
        chosen = {"foreach": kernel == "foreach", "fused": kernel == "fused"}

        def choose(*_: Any) -> None:
            for group in optimizer.param_groups:
                group.update({key: value for key, value in chosen.items() if key in defaults})
            _place_step_counts(optimizer)

        def say_given(_: Any, state: dict[str, Any]) -> None:
            for saved, values in zip(state["param_groups"], given, strict=False):
                _set_or_drop(saved, values)

        handles = [
            optimizer.register_load_state_dict_post_hook(choose),
            optimizer.register_state_dict_post_hook(say_given),
        ]
        # The scaler must unscale gradients for every kernel: `loop` and `foreach` cannot do it themselves.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        optimizer.defaults.update({key: chosen[key] for key in defaults})
        choose()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for group, values in zip(optimizer.param_groups, given, strict=True):
                _set_or_drop(group, values)
            optimizer.defaults.update(defaults)
            _set_or_drop(vars(optimizer), attributes)
            _place_step_counts(optimizer)


def kernel_of(group: dict[str, Any], device: Literal["cpu", "cuda"]) -> Kernel:
    """Return the kernel that a parameter group of ``torch.optim`` uses, by its options or torch's defaults."""
    if group.get("fused"):
        return "fused"
    is_left_open = group.get("foreach") is None and group.get("fused") is None
    by_default = device == "cuda" and not group.get("differentiable") and not isinstance(group["lr"], Tensor)
    return "foreach" if group.get("foreach") or (is_left_open and by_default) else "loop"


def _obstacle(kernel: Any, workload: Workload, device: Literal["cpu", "cuda"]) -> str | None:
    """Return the reason why a kernel cannot be used; ``None`` if it can."""
    optimizer = workload.optimizer
    groups, name = optimizer.param_groups, type(optimizer).__name__
    if not is_of_torch(optimizer) or ("fused" if kernel == "fused" else "foreach") not in optimizer.defaults:
        return f"{name} has no `{kernel}` kernel to choose"
    if kernel == "loop":
        return None
    if any(group.get("differentiable") for group in groups):
        return "the update must be differentiable, which only `loop` supports"
    if kernel == "fused":
        return _obstacle_to_fused(workload, device)
    needs_loop = any(isinstance(group["lr"], Tensor) and not group.get("capturable") for group in groups)
    return "the learning rate is a tensor, which `foreach` supports only with capturable=True" if needs_loop else None


def _obstacle_to_fused(workload: Workload, device: Literal["cpu", "cuda"]) -> str | None:
    kind = type(workload.optimizer)
    parameters = (parameter for group in workload.optimizer.param_groups for parameter in group["params"])
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "some parameters are not floating-point, which `fused` does not support"
    if any(getattr(module, "sparse", False) for module in workload.model.modules() if isinstance(module, _EMBEDDINGS)):
        return "an embedding has sparse gradients, which `fused` does not support"
    # `fused` Adagrad was added for CUDA later than for the CPU. A torch without it passes this argument.
    if device == "cuda" and "cuda_unsupported=True" in inspect.getsource(inspect.getmodule(kind) or torch):
        return f"this torch ({torch.__version__}) has no `fused` {kind.__name__} for CUDA"
    return None


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def _place_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move the step count of every state to the device that the kernel of its group needs."""
    for group in optimizer.param_groups:
        is_beside = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            count = state.get("step")
            if isinstance(count, Tensor):
                state["step"] = count.to(parameter.device, torch.float32) if is_beside else _on_host(count)


def _on_host(count: Tensor) -> Tensor:
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32  # the dtype of torch.optim
    return count.cpu().to(dtype)


def _set_or_drop(settings: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if value is _MISSING:
            settings.pop(key, None)
        else:
            settings[key] = value
