"""CUDA graphs: micro-batches of equal shape are captured once and replayed, so a pass is one launch.

A small micro-batch takes as long as its kernel launches. It launches thousands of kernels, and Python and autograd take
about ten microseconds for each (https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). The step captures and
replays the graph (`plimsoll.step.cuda_graphs.replays`). The graph has its own memory: the activations of a micro-batch
stay reserved between passes, and gradients between steps.

Numerics: bitwise. Micro-batches of another shape run eagerly. Does NOT cover CPUs, several ranks, and passes that need
Python or the host. A pass needs them if it copies data between host and device, branches on values, keeps state, or
updates parameters in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from plimsoll.models.hooks import CapturedPass
from plimsoll.models.workload import Workload, hooked
from plimsoll.records.plan import Choice
from plimsoll.techniques import technique_of
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique


class CudaGraph(Technique):
    """`Technique`: replay micro-batches of equal shape as one captured graph."""

    name = "cuda_graph"
    numerics = "bitwise"
    summary = "micro-batches of equal shape replayed as one captured graph: a single launch"
    needs = frozenset({"step"})
    may_be_faster = True
    by_hand = "capture forward and backward with torch.cuda.graph"
    stage = "graph"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice, if all micro-batches have the same shape and the device is CUDA."""
        return _obstacle(workload, setting) or (Choice(technique=self.name),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if another technique moves data, or needs Python, within a pass."""
        reasons = (technique_of(other.technique).not_captured for other in others)
        return next(filter(None, reasons), None) or _obstacle(workload, setting)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Make the step capture graphs; on exit, free the memory of the graphs."""
        captured: list[CapturedPass] = []
        with hooked(workload, replace(workload.hooks, captured=captured)):
            try:
                yield
            finally:
                for one in captured:
                    one.release()


def _obstacle(workload: Workload, setting: Setting) -> str | None:
    if setting.device != "cuda":
        return "a CPU has no CUDA graphs"
    if setting.num_ranks > 1:
        return f"it is not verified for several ranks, and this training has {setting.num_ranks}"
    if setting.lengths_vary:
        return "samples have different lengths, and a graph has one shape"
    for name, module in workload.model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            return f"{name or type(module).__name__} uses dropout of cuDNN, which torch's generators do not control"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{name} has sparse gradients, whose size depends on values"
    return None
