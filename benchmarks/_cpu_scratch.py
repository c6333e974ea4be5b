"""Memory that torch's CPU ops use in addition to the tensors they return: during the call, and permanently.

    python benchmarks/_cpu_scratch.py [--threads 1] [--case NAME]

Each case runs three times in a separate process. There, glibc maps every block from 128 KiB, so that freed blocks are
returned to the system at once. A dispatch mode reads resident private memory and its peak around every op; a write to
``/proc/self/clear_refs`` resets the kernel's peak.

- *Taken* is the peak above the value before the op, minus the resident pages of the new tensors.
- *Kept* is the increase after the op, minus the same pages.

If only the first call takes or keeps memory, a library has cached it. The bytes of new tensors without a touched page
are reported too (oneDNN's workspace of a recurrent layer).

The last line of the output is one JSON object. It is the source of the numbers in
`plimsoll.memory.lowering.cpu_scratch`. Not covered: bfloat16 and float16, and other processors than the current one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 1 << 20
PAGE_BYTES = 4096
LEAST_BYTES = 256 << 10  # smaller numbers are not printed: the reading itself touches pages
HIGH_WATER = re.compile(rb"VmHWM:\s*(\d+) kB.*?RssFile:\s*(\d+) kB\s*RssShmem:\s*(\d+) kB", re.DOTALL)


def private_bytes() -> int:
    with open("/proc/self/statm") as file:
        _, pages, shared, *_ = map(int, file.read().split())
    return (pages - shared) * PAGE_BYTES


def start_peak() -> None:
    with open("/proc/self/clear_refs", "wb") as file:
        file.write(b"5")


def peak_bytes() -> int:
    with open("/proc/self/status", "rb") as file:
        found = HIGH_WATER.search(file.read())
    assert found
    highest, files, shared = map(int, found.groups())
    return (highest - files - shared) * 1024


def resident_bytes(tensor: Tensor) -> int:
    """Return the bytes of a storage's pages that are present."""
    storage = tensor.untyped_storage()
    first = storage.data_ptr() // PAGE_BYTES
    last = -(-(storage.data_ptr() + storage.nbytes()) // PAGE_BYTES)
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(first * 8)
        entries = file.read((last - first) * 8)
    return sum(entry >> 7 for entry in entries[7::8]) * PAGE_BYTES


class Watch(TorchDispatchMode):
    """Dispatch mode that reads memory around every op."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.turn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given_before = {t.untyped_storage().data_ptr(): resident_bytes(t) for t in tensors((args, kwargs))}
        before = private_bytes()
        start_peak()
        out = func(*args, **(kwargs or {}))
        peak, after = peak_bytes(), private_bytes()
        new = {
            t.untyped_storage().data_ptr(): t
            for t in tensors(out)
            if t.untyped_storage().data_ptr() not in given_before
        }
        grown = sum(resident_bytes(t) for t in new.values())
        given = unique((args, kwargs))
        grown += sum(resident_bytes(t) - given_before[t.untyped_storage().data_ptr()] for t in given)
        size = sum(t.untyped_storage().nbytes() for t in new.values())
        line = {
            "op": str(func),
            "turn": self.turn,
            "shapes": [list(t.shape) for t in tensors((args, kwargs))],
            "taken_bytes": peak - before - grown,
            "kept_bytes": after - before - grown,
            "untouched_bytes": size - sum(resident_bytes(t) for t in new.values()),
        }
        is_only_empty = func.overloadpacket.__name__.startswith(("empty", "new_empty"))  # written by the next op
        if not is_only_empty and max(line[name] for name in line if name.endswith("_bytes")) >= LEAST_BYTES:
            self.lines.append(line)
        return out


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes()]


def unique(tree: Any) -> list[Tensor]:
    return list({t.untyped_storage().data_ptr(): t for t in tensors(tree)}.values())


def linear(rows: int, width: int, out: int) -> Callable[[], None]:
    layer, x = nn.Linear(width, out), torch.randn(rows, width, requires_grad=True)
    return lambda: layer(x).backward(torch.ones(rows, out))


def matrices(num: int, rows: int, width: int) -> Callable[[], None]:
    a, b = (torch.randn(num, *shape, requires_grad=True) for shape in ((rows, width), (width, rows)))
    return lambda: torch.bmm(a, b).backward(torch.ones(num, rows, rows))


def recurrent(kind: type[nn.Module], inputs: int, hidden: int, rows: int, steps: int) -> Callable[[], None]:
    net, x = kind(inputs, hidden, batch_first=True), torch.randn(rows, steps, inputs, requires_grad=True)
    return lambda: net(x)[0].sum().backward()


def attention(rows: int, heads: int, steps: int, width: int, how: str) -> Callable[[], None]:
    q, k, v = (torch.randn(rows, heads, steps, width, requires_grad=True) for _ in range(3))
    mask = torch.zeros(rows, 1, steps, steps) if how == "mask" else None
    options = {"attn_mask": mask, "is_causal": how == "causal", "dropout_p": 0.1 if how == "dropout" else 0.0}
    gradient = torch.ones(rows, heads, steps, width)
    return lambda: functional.scaled_dot_product_attention(q, k, v, **options).backward(gradient)


def convolution(rows: int, channels: int, steps: int, out: int, kernel: int) -> Callable[[], None]:
    layer, x = nn.Conv1d(channels, out, kernel, padding=kernel // 2), torch.randn(rows, channels, steps)
    x.requires_grad_()
    gradient = torch.ones(rows, out, steps)
    return lambda: layer(x).backward(gradient)


def pointwise(rows: int, width: int) -> Callable[[], None]:
    x, norm = torch.randn(rows, width, requires_grad=True), nn.LayerNorm(width)
    ids = torch.randint(0, width, (rows,))

    def run() -> None:
        y = functional.dropout(functional.gelu(norm(x)), 0.1)
        functional.cross_entropy(y, ids).backward()

    return run


def embedding(vocab: int, width: int, rows: int) -> Callable[[], None]:
    table, ids = nn.Embedding(vocab, width), torch.randint(0, vocab, (rows,))
    return lambda: table(ids).sum().backward()


def optimizer(kind: Any, *, foreach: bool) -> Callable[[], None]:
    parameters = [nn.Parameter(torch.randn(2048, 1024)) for _ in range(4)]
    chosen = kind(parameters, lr=1e-3, foreach=foreach)

    def run() -> None:
        for p in parameters:
            p.grad = torch.ones_like(p)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        chosen.step()

    return run


CASES: dict[str, Callable[[], Callable[[], None]]] = {
    **{
        f"linear {r}x{w} to {o}": (lambda r=r, w=w, o=o: linear(r, w, o))
        for r, w, o in (
            (256, 256, 256), (2048, 64, 64), (2048, 256, 1024), (2048, 256, 8000), (2048, 1024, 1024),
            (8192, 1024, 4096), (2048, 768, 50257), (512, 768, 3072),
        )
    },
    **{
        f"bmm {n}x{r}x{w}": (lambda n=n, r=r, w=w: matrices(n, r, w))
        for n, r, w in ((32, 256, 64), (96, 512, 64), (8, 1024, 128))
    },
    **{
        f"{k.__name__} {i} {h} {b}x{t}": (lambda k=k, i=i, h=h, b=b, t=t: recurrent(k, i, h, b, t))
        for k in (nn.LSTM, nn.GRU)
        for i, h, b, t in (
            (256, 512, 16, 128), (512, 512, 16, 128), (256, 512, 16, 64), (256, 512, 32, 128), (256, 256, 16, 128),
            (64, 512, 16, 128), (256, 1024, 8, 128), (300, 300, 20, 35),
        )
    },
    **{
        f"sdpa {b}x{h}x{t}x{w} {how}": (lambda b=b, h=h, t=t, w=w, how=how: attention(b, h, t, w, how))
        for b, h, t, w, how in (
            (8, 4, 256, 64, "plain"), (8, 4, 1024, 64, "plain"), (8, 4, 1024, 64, "causal"), (8, 4, 512, 64, "mask"),
            (8, 4, 512, 64, "dropout"), (8, 4, 1024, 64, "dropout"), (2, 12, 1024, 64, "causal"),
        )
    },
    **{
        f"conv1d {b}x{c}x{t} to {o}, {k}": (lambda b=b, c=c, t=t, o=o, k=k: convolution(b, c, t, o, k))
        for b, c, t, o, k in (
            (16, 128, 256, 256, 3), (16, 128, 256, 256, 5), (32, 320, 128, 64, 5), (16, 128, 512, 256, 3),
        )
    },
    "pointwise 2048x8000": lambda: pointwise(2048, 8000),
    "pointwise 8192x1024": lambda: pointwise(8192, 1024),
    "embedding 8000x256, 2048": lambda: embedding(8000, 256, 2048),
    "embedding 50257x768, 8192": lambda: embedding(50257, 768, 8192),
    "AdamW foreach": lambda: optimizer(torch.optim.AdamW, foreach=True),
    "AdamW one by one": lambda: optimizer(torch.optim.AdamW, foreach=False),
}  # fmt: skip


def run_case(name: str, num_threads: int) -> None:
    """Run one case in this process and print its lines as JSON."""
    torch.set_num_threads(num_threads)
    ctypes.CDLL(None).mallopt(-3, 128 << 10)
    run = CASES[name]()
    with Watch() as watch:
        torch.ones(8).sum()
        for watch.turn in range(3):
            run()
    print(json.dumps(watch.lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        return run_case(given.here, given.threads)
    results = {}
    environment = os.environ | {"OMP_NUM_THREADS": str(given.threads)}
    for name in (name for name in CASES if not given.case or given.case in name):
        command = [sys.executable, __file__, "--here", name, "--threads", str(given.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(name)
        for line in results[name]:
            numbers = "  ".join(f"{line[k] / MIB:8.2f}" for k in ("taken_bytes", "kept_bytes", "untouched_bytes"))
            print(f"    {line['op']:52} turn {line['turn']}  {numbers}  {line['shapes'][:4]}", flush=True)
    print(json.dumps({"torch": torch.__version__, "threads": given.threads, "cases": results}))
    return None


if __name__ == "__main__":
    main()
