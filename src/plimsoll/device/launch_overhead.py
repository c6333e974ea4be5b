"""Measurement of the CPU overhead of op calls during training, on a real model that is too small to compute much.

    found = measure_launches("cuda:0")     # a third of a second, but longer for the first call in a process
    found.module_op_seconds, found.backward_op_seconds

A tiny GPT-2 of transformers runs forward under autocast and backward a few times. Modules, autograd and casts add the
same overhead per call as in large models. It is three times the overhead of a bare call in a loop.

Does NOT know how busy the processor will be. On one machine, the time per call of the same training run varied within
minutes from 0.7 to 1.5 times the usual time (docs/LOG.md).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

VIEW_SHARE = 0.3
"""Overhead of a view, as a share of the overhead of other ops. A view allocates nothing and launches no kernel."""

_TINY: dict[str, Any] = {
    "vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_NUM_PASSES, _NUM_WARM = 7, 2


class Launches(NamedTuple):
    """CPU seconds of one op call in training.

    Attributes:
        module_op_seconds: seconds of a call that a Python module makes in the forward pass.
        backward_op_seconds: seconds of a call that autograd makes in the backward pass.
    """

    module_op_seconds: float
    backward_op_seconds: float


def measure_launches(device: str) -> Launches:
    """Measure the overhead of op calls on a device of this machine.

    Args:
        device: ``"cpu"``, or a CUDA device of this machine.
    """
    with torch.random.fork_rng([] if device == "cpu" else [torch.device(device)]), torch.enable_grad():
        # Counted on the CPU: backward on a GPU runs in another thread, where a dispatch mode does not see its ops.
        called, cast, by_autograd = _count_ops(_tiny_model("cpu"))
        model = _tiny_model(device)
        passes = [_pass_seconds(model, device) for _ in range(_NUM_WARM + _NUM_PASSES)][_NUM_WARM:]
    forward_seconds, backward_seconds = (min(times) for times in zip(*passes, strict=True))
    # Same accounting as in `plimsoll.planning.search.time_model`.
    backward_op_seconds = backward_seconds / by_autograd
    module_op_seconds = (forward_seconds - cast * backward_op_seconds) / called
    # If every backward pass was interrupted, its measured time would be so long that casts seem to take the whole
    # forward pass.
    return Launches(max(module_op_seconds, backward_op_seconds), backward_op_seconds)


def _tiny_model(device: str) -> nn.Module:
    import transformers

    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_TINY))
    return model.train().to(device)


def _forward(model: nn.Module) -> Tensor:
    tokens = torch.arange(16, device=next(model.parameters()).device).view(2, 8)
    with _autocast(tokens.device.type):
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _autocast(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, torch.bfloat16)


def _pass_seconds(model: nn.Module, device: str) -> tuple[float, float]:
    """Return the CPU time of launching the forward and of launching the backward pass, in seconds."""
    model.zero_grad()
    _wait(device)
    started = time.perf_counter()
    loss = _forward(model)
    called = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    ended = time.perf_counter()
    _wait(device)
    return called - started, ended - called


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _count_ops(model: nn.Module) -> tuple[float, float, float]:
    """Count the op calls of a forward and a backward pass.

    Returns:
        the number of ops other than casts in the forward pass, of casts in the forward pass, and of all ops in the
        backward pass.
    """
    with _Counter() as forward:
        loss = _forward(model)
    with _Counter() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return forward.num_ops, forward.num_casts, backward.num_ops + backward.num_casts


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the ops and casts that run in a ``with`` block. A view counts as `VIEW_SHARE` of an op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = self.num_casts = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.num_casts += 1
        else:
            self.num_ops += VIEW_SHARE if func.is_view else 1
        return func(*args, **(kwargs or {}))
