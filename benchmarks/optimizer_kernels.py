"""Time, temporary memory and states of one AdamW update of a GPT-2: plain, and in the step that can be undone.

    python benchmarks/optimizer_kernels.py --layers 6 --width 384 --device cpu

Measured with each kernel of torch, and with moments of 8 and 4 bits. Prints a table, and one JSON object with the
figures as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.memory.live import live_bytes
from plimsoll.memory.recorder import Recorder
from plimsoll.step.oom_boundary import Position
from plimsoll.step.update.commit import StepCommit
from plimsoll.techniques.mechanisms.low_bit_adam import LowBitAdam

KERNELS = ("loop", "foreach", "fused")
LOW_BITS = {"8 bits": 8, "4 bits": 4}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    model = gpt2(options.layers, options.width).to(options.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"AdamW of {num_parameters:,} parameters on {options.device}, {torch.get_num_threads()} threads")
    print(f"{'kernel':8} {'plain':>10} {'undoable':>10} {'temporaries':>12} {'undoable':>10} {'states':>10}")
    kinds = (*KERNELS, *LOW_BITS)
    figures = {kind: measured(model, kind, options.device, options.repeat) for kind in kinds}
    for kernel, row in figures.items():
        print(
            f"{kernel:8} {row['plain_seconds'] * 1e3:7.1f} ms {row['undoable_seconds'] * 1e3:7.1f} ms "
            f"{row['plain_bytes'] / 2**20:8.1f} MiB {row['undoable_bytes'] / 2**20:6.1f} MiB "
            f"{row['state_bytes'] / 2**20:6.1f} MiB"
        )
    print(json.dumps({"parameters": num_parameters, "device": options.device, "kernels": figures}))


def gpt2(num_layers: int, width: int) -> nn.Module:
    """Build a GPT-2 with the original vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=num_layers, n_embd=width, n_head=width // 64))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Build AdamW with one of torch's kernels, or with low-bit moments."""
    if kind in LOW_BITS:
        settings = {"lr": 1e-4, "weight_decay": 1e-2, "decoupled_weight_decay": True}
        return LowBitAdam(model.parameters(), bits=LOW_BITS[kind], **settings)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=kind == "foreach", fused=kind == "fused")


def measured(model: nn.Module, kind: str, device: str, repeat: int) -> dict[str, float]:
    """Measure the median seconds and the temporary bytes of an update with existing states."""
    optimizer = optimizer_of(model, kind)
    commit = StepCommit(optimizer, backend_for(device), Position())
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    figures: dict[str, float] = {}
    for name, one in (("plain", optimizer), ("undoable", commit)):
        seconds = []
        for _ in range(repeat + 1):
            give(model, gradients)
            synchronize(device)
            start = time.perf_counter()
            one.step()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        figures[f"{name}_seconds"] = statistics.median(seconds[1:])
        figures[f"{name}_bytes"] = temporaries_bytes(model, gradients, optimizer, one)
    states = [value for state in optimizer.state.values() for value in state.values()]
    figures["state_bytes"] = sum(value.nbytes for value in states)
    return figures


def give(model: nn.Module, gradients: list[torch.Tensor]) -> None:
    """Assign its gradient to every parameter."""
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def temporaries_bytes(
    model: nn.Module,
    gradients: list[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    update: torch.optim.Optimizer | StepCommit,
) -> int:
    """Return the peak of temporary allocations in one update, counted in its ops."""
    give(model, gradients)
    with Recorder(phase=lambda: "optimizer") as recorder:
        recorder.know_model(model)
        recorder.know_optimizer(optimizer)
        recorder.know(((name, one.grad) for name, one in model.named_parameters() if one.grad is not None), "gradients")
        recorder.step = 1
        update.step()
    live = live_bytes(recorder.trace("measured", "cpu"))
    made = live.by_category.get("temporaries")
    return 0 if made is None else int(made.max())


def synchronize(device: str) -> None:
    """Wait for queued work on the device."""
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
