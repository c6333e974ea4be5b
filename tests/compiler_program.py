"""Effects of torch's compiler, printed as JSON; as a program, it defers loading the compiler at first."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from plimsoll.memory.compiler import COMPILER, Deferring


class Finder:
    """Finder that defers loading the compiler, as in the process of a command."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find only the compiler."""
        spec = PathFinder.find_spec(name, path) if name == COMPILER else None
        if spec is not None and spec.loader is not None:
            spec.loader = Deferring(spec.loader)
        return spec


def has_run() -> bool:
    """Return whether the compiler is loaded."""
    return type(torch._dynamo) is type(sys.modules["torch._dynamo.source"]) is ModuleType


def trained() -> list[Any]:
    """Use code that imports the compiler and compiles nothing: checkpoints, optimizers, fake tensors and constants."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    losses = []
    for name in ("SGD", "AdamW", "Adagrad", "RMSprop"):
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.01)
        for _ in range(2):
            loss = checkpoint(lambda x: layer(x).tanh().sum(), torch.ones(2, 3), use_reentrant=False)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(torch.ones(3, 4)), torch.tensor(0.5) * torch.ones(2, 3)]
    return [losses, [(tuple(fake.shape), str(fake.dtype)) for fake in fakes]]


def view() -> list[Any]:
    """Make a fake tensor of a view, for which torch asks for code without a stand-in."""
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.arange(12).reshape(3, 4)[1:, ::2])
    return [tuple(fake.shape), fake.stride(), fake.storage_offset(), fake._is_view()]


def marked() -> Any:
    """Return a function with all decorators that have a stand-in, and a list of its calls."""
    import torch._dynamo

    calls: list[str] = []

    @torch.compiler.disable
    def apart(x: torch.Tensor) -> torch.Tensor:
        calls.append("apart")
        return x + 1

    @torch.compiler.disable(recursive=False)
    def above(x: torch.Tensor) -> torch.Tensor:
        return x * 5

    @torch._dynamo.assume_constant_result
    def constant() -> int:
        calls.append("constant")
        return 3

    @torch._dynamo.allow_in_graph
    def whole(x: torch.Tensor) -> torch.Tensor:
        return x + 7

    def work(x: torch.Tensor) -> torch.Tensor:
        y = above(apart(x * 2)) * constant()
        torch._dynamo.graph_break()
        return whole(y) - 1

    return work, calls


def compiled(work: Any, calls: list[str]) -> list[Any]:
    """Compile a function; return its graphs, its results, and the calls that really ran."""
    graphs = []

    def note(graph: Any, _: Any) -> Any:
        graphs.append([str(node.target).partition(" at 0x")[0] for node in graph.graph.nodes])
        return graph.forward

    calls.clear()
    results = [torch.compile(work, backend=note)(torch.ones(2)).tolist() for _ in range(2)]
    return [graphs, results, calls]


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder)
    before = trained()
    work, calls = marked()
    work(torch.ones(2))
    said = {"trained": before, "had_run": has_run()}
    said |= {"view": view(), "compiled": compiled(work, calls), "trained_later": trained(), "has_run": has_run()}
    print(json.dumps(said))
