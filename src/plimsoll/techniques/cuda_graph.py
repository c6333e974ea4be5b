"""CUDA graphs: micro-batches of equal shape are captured once and replayed, so that a pass is one launch.

A small micro-batch takes the time of its launches: thousands of kernels, each called by Python and autograd for some
ten microseconds (https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). The step captures and replays
(`plimsoll.step.cuda_graphs.replays`). The graph has memory of its own: the activations of a micro-batch stay reserved
between passes, and gradients between steps.

Numerics: bitwise. Does NOT cover CPUs, micro-batches of changing shapes (those of another shape run eagerly), several
ranks, and passes that Python or the host take part in: what moves data between host and device, picks by values, counts
or keeps something, or updates parameters in backward.
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
        """One choice, where shapes are equal and the device has graphs."""
        return _obstacle(workload, setting) or (Choice(technique=self.name),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Nothing else may move data, or let Python go on, within a pass."""
        reasons = (technique_of(other.technique).not_captured for other in others)
        return next(filter(None, reasons), None) or _obstacle(workload, setting)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Ask the step for it; on exit the graph's memory is given back."""
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
        return f"not shown to be the same where {setting.num_ranks} ranks train together"
    if setting.lengths_vary:
        return "samples have different lengths, and a graph has one shape"
    for name, module in workload.model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            return f"{name or type(module).__name__} has a dropout of cuDNN's, which no generator of torch draws"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{name} has sparse gradients, whose size depends on values"
    return None
