"""Output layer and cross entropy: memory, time and accuracy of plain PyTorch, `F.linear_cross_entropy` and Plimsoll.

    python benchmarks/loss_memory.py

Each method computes forward and backward of one loss in a separate process. Memory is the peak of resident bytes above
the value before the first forward: hidden states, weight and labels exist by then, and gradients count. Seconds are of
the processor, in the best round, with one thread by default. The reference for accuracy has logits in fp32 and the rest
in fp64. Errors are the relative error of the loss, and the largest error in 512 rows of the weight's gradient relative
to their largest element. The last line is JSON. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from plimsoll.records.units import format_bytes
from plimsoll.techniques.mechanisms.chunked_cross_entropy import Layer, LossOptions, chunked_cross_entropy

SHOWN = Console(stderr=False, width=140)
SHAPES = ((4096, 256, 8000), (2048, 768, 50257))
DTYPES = ("float32", "bfloat16")
CHUNKS = (1024, 256, 64)
LOGIT_SPREAD = 3.0  # standard deviation of the logits, as in a trained model

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Figures:
    """One method for one loss."""

    way: str
    tokens: int
    features: int
    outputs: int
    dtype: str
    peak_bytes: int
    seconds: float
    loss_error: float
    gradient_error: float


def plain(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden_ND, weight_VD), target_N)


def plain_in_fp32(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """Compute the loss in fp32, as Hugging Face's losses do."""
    return functional.cross_entropy(functional.linear(hidden_ND, weight_VD).float(), target_N)


def torchs(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, chunk_tokens: int | None) -> Tensor:
    arguments = {} if chunk_tokens is None else {"batch_chunk_size": chunk_tokens}
    options = torch.nn.LinearCrossEntropyOptions(**arguments)
    return functional.linear_cross_entropy(hidden_ND, weight_VD, target_N, options=options)


def ours(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, chunk_tokens: int) -> Tensor:
    options = LossOptions(chunk_tokens, hidden_ND.dtype, torch.float32, torch.float32)
    return chunked_cross_entropy(Layer(hidden_ND, weight_VD, None), target_N, options)


def ways() -> dict[str, Loss]:
    found: dict[str, Loss] = {"plain": plain, "plain, logits in fp32": plain_in_fp32}
    if hasattr(functional, "linear_cross_entropy"):
        for chunk in (None, 256):
            name = "as it chooses" if chunk is None else f"chunks of {chunk}"
            found[f"F.linear_cross_entropy, {name}"] = lambda *inputs, chunk=chunk: torchs(*inputs, chunk)
    for chunk in CHUNKS:
        found[f"chunked_loss={chunk}"] = lambda *inputs, chunk=chunk: ours(*inputs, chunk)
    return found


def peak_bytes_of_process() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def measure(way: str, shape: tuple[int, int, int], dtype: str, rounds: int) -> Figures:
    torch.manual_seed(0)
    num_tokens, num_features, num_outputs = shape
    hidden = torch.randn(num_tokens, num_features, dtype=torch.float32)
    weight = torch.randn(num_outputs, num_features).mul_(LOGIT_SPREAD / num_features**0.5)
    target = torch.randint(num_outputs, (num_tokens,))
    kind = getattr(torch, dtype)
    inputs = hidden.to(kind).requires_grad_(), weight.to(kind).requires_grad_()
    del hidden, weight
    work = ways()[way]
    # The first matrix product creates the library's threads and buffers.
    (torch.randn(64, 64, dtype=kind) @ torch.randn(64, 64, dtype=kind)).sum()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current resident memory
    before = peak_bytes_of_process()
    seconds = []
    for _ in range(rounds):
        for tensor in inputs:
            tensor.grad = None
        started = time.process_time()
        loss = work(*inputs, target)
        loss.backward()
        seconds.append(time.process_time() - started)
    peak = peak_bytes_of_process() - before
    loss_error, gradient_error = errors(inputs[0], inputs[1], target, loss)
    return Figures(way, *shape, dtype, peak, min(seconds), loss_error, gradient_error)


def errors(hidden: Tensor, weight: Tensor, target: Tensor, loss: Tensor) -> tuple[float, float]:
    """Compare the loss and part of the weight's gradient with a reference: logits in fp32, the rest in fp64."""
    kept_rows = 512
    total, gradient = 0.0, torch.zeros(kept_rows, hidden.shape[1], dtype=torch.float64)
    matrix = weight.detach().float()
    for rows in torch.arange(len(target)).split(256):
        log_probabilities = (hidden.detach()[rows].float() @ matrix.t()).double().log_softmax(dim=1)
        total -= log_probabilities.gather(1, target[rows, None]).sum().item()
        slope = log_probabilities[:, :kept_rows].exp()
        slope -= functional.one_hot(target[rows], len(matrix))[:, :kept_rows]
        gradient += slope.t() @ hidden.detach()[rows].double() / len(target)
    mean = total / len(target)
    assert weight.grad is not None
    largest = (weight.grad[:kept_rows].double() - gradient).abs().max() / gradient.abs().max()
    return abs(loss.item() - mean) / mean, float(largest)


def in_new_process(way: str, shape: tuple[int, int, int], dtype: str, arguments: argparse.Namespace) -> Figures:
    one = json.dumps([way, shape, dtype])
    options = ["--rounds", str(arguments.rounds), "--threads", str(arguments.threads)]
    done = subprocess.run(
        [sys.executable, __file__, "--one", one, *options], capture_output=True, text=True, check=True
    )
    print(done.stdout.strip(), file=sys.stderr, flush=True)
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def table_of(figures: list[Figures]) -> Table:
    first = figures[0]
    table = Table(title=f"{first.tokens} tokens, {first.features} features, {first.outputs} outputs, {first.dtype}")
    table.add_column("way")
    for name in ("memory", "seconds", "error of the loss", "error of the gradient"):
        table.add_column(name, justify="right")
    for one in figures:
        errors_shown = f"{one.loss_error:.1e}", f"{one.gradient_error:.1e}"
        table.add_row(one.way, format_bytes(one.peak_bytes), f"{one.seconds:.2f}", *errors_shown)
    return table


def _differs(way: str, dtype: str) -> bool:
    return way != "plain, logits in fp32" or dtype != "float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each method (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.one:
        way, shape, dtype = json.loads(arguments.one)
        print(json.dumps(asdict(measure(way, tuple(shape), dtype, arguments.rounds))))
        return
    everything = []
    for shape in SHAPES:
        for dtype in DTYPES:
            figures = [in_new_process(way, shape, dtype, arguments) for way in ways() if _differs(way, dtype)]
            SHOWN.print(table_of(figures))
            everything += [asdict(one) for one in figures]
    print(json.dumps({"torch": torch.__version__, "figures": everything}))


if __name__ == "__main__":
    main()
