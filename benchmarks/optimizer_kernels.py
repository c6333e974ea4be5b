"""Seconds and temporaries of one AdamW update of a GPT-2 in each kernel: plain, and in the step that can be undone.

    python benchmarks/optimizer_kernels.py --layers 6 --width 384 --device cpu

Prints a table, and as its last line one JSON object with the figures.
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
from plimsoll.run.boundary import Position
from plimsoll.run.commit import StepCommit

KERNELS = ("loop", "foreach", "fused")


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
    print(f"{'kernel':8} {'plain':>10} {'undoable':>10} {'temporaries':>12} {'undoable':>10}")
    figures = {kernel: measured(model, kernel, options.device, options.repeat) for kernel in KERNELS}
    for kernel, row in figures.items():
        print(
            f"{kernel:8} {row['plain_seconds'] * 1e3:7.1f} ms {row['undoable_seconds'] * 1e3:7.1f} ms "
            f"{row['plain_bytes'] / 2**20:8.1f} MiB {row['undoable_bytes'] / 2**20:6.1f} MiB"
        )
    print(json.dumps({"parameters": num_parameters, "device": options.device, "kernels": figures}))


def gpt2(num_layers: int, width: int) -> nn.Module:
    """A GPT-2 with the vocabulary of the original."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=num_layers, n_embd=width, n_head=width // 64))


def measured(model: nn.Module, kernel: str, device: str, repeat: int) -> dict[str, float]:
    """Seconds (the median) and bytes beside what stays, of an update whose states exist."""
    flags = {"foreach": kernel == "foreach", "fused": kernel == "fused"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **flags)
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
    return figures


def give(model: nn.Module, gradients: list[torch.Tensor]) -> None:
    """Let every parameter have its gradient."""
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def temporaries_bytes(
    model: nn.Module,
    gradients: list[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    update: torch.optim.Optimizer | StepCommit,
) -> int:
    """What one update allocates at most, counted in its ops."""
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
    """Wait for what was begun."""
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
