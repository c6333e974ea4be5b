"""What the calls of a training cost the processor, measured on a real one that is too small to do anything else.

    found = measure_launches("cuda:0")     # a third of a second; the second call in a process
    found.module_op_seconds, found.backward_op_seconds

A tiny GPT-2 of transformers goes forward under autocast and backward a few times. Its modules, autograd and the casts
are those of large models, and take as long as there: what a bare call in a loop takes tells a third of it.

Does NOT know how busy the processor will be: the same training was seen to take 0.7 to 1.5 times as long per call on
one machine within minutes (docs/LOG.md).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

VIEW_SHARE = 0.3
"""Of what a call takes, where an op moves nothing: no memory is asked for, no kernel is set up."""

_TINY: dict[str, Any] = {
    "vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_NUM_PASSES, _NUM_WARM = 7, 2


class Launches(NamedTuple):
    """Seconds of the processor for a call from Python in a forward, and for one by autograd in a backward."""

    module_op_seconds: float
    backward_op_seconds: float


def measure_launches(device: str) -> Launches:
    """Measure what calls cost on a device that is here.

    Args:
        device: ``"cpu"``, or a CUDA device of this machine.
    """
    with torch.random.fork_rng([] if device == "cpu" else [torch.device(device)]), torch.enable_grad():
        # On the processor: a backward on a GPU has a thread of its own, whose ops a dispatch mode does not see.
        called, cast, by_autograd = _count_ops(_tiny_model("cpu"))
        model = _tiny_model(device)
        passes = [_pass_seconds(model, device) for _ in range(_NUM_WARM + _NUM_PASSES)][_NUM_WARM:]
    forward_seconds, backward_seconds = (min(times) for times in zip(*passes, strict=True))
    # As `plimsoll.planning.search.time_model` counts them.
    backward_op_seconds = backward_seconds / by_autograd
    module_op_seconds = (forward_seconds - cast * backward_op_seconds) / called
    # Beside so many casts a forward may seem to take nothing on a processor that was interrupted in the backwards.
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
    """Of the calls alone: a device is waited for before and after both, and not between."""
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
    """Ops that Python calls in a forward, those that cast there, and those of a backward; a view is a part of one."""
    with _Counter() as forward:
        loss = _forward(model)
    with _Counter() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return forward.num_ops, forward.num_casts, backward.num_ops + backward.num_casts


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ops of a block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = self.num_casts = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.num_casts += 1
        else:
            self.num_ops += VIEW_SHARE if func.is_view else 1
        return func(*args, **(kwargs or {}))
