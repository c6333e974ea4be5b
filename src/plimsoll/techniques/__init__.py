"""Every technique there is, one module each, and how a set of them is put to work.

    with installed(workload, choices):
        ...

`TECHNIQUES` is in the order of installation: first what moves states and parameters, which stays at work when a plan
goes on to a fallback that begins alike; then what replaces parts of the model, and what wraps calls of it.
The contract tests run over the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from plimsoll.models.names import require_technique
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, Value
from plimsoll.records.trace import Phase
from plimsoll.techniques.activation_offload import ActivationOffload
from plimsoll.techniques.adafactor import Adafactor
from plimsoll.techniques.adaptive_softmax import AdaptiveSoftmax
from plimsoll.techniques.allocator import Allocator
from plimsoll.techniques.attention import Attention
from plimsoll.techniques.autocast import Autocast
from plimsoll.techniques.by_length import ByLength
from plimsoll.techniques.cache import Cache
from plimsoll.techniques.checkpointing import Checkpointing
from plimsoll.techniques.chunked_loss import ChunkedLoss
from plimsoll.techniques.cuda_graph import CudaGraph
from plimsoll.techniques.evaluation import EvaluationPass
from plimsoll.techniques.fully_shard import FullyShard
from plimsoll.techniques.gradient_cache import FOUND, GradientCache
from plimsoll.techniques.heap import Heap
from plimsoll.techniques.layer_streaming import LayerStreaming
from plimsoll.techniques.lora import Lora
from plimsoll.techniques.low_bit_optimizer import LowBitOptimizer
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique
from plimsoll.techniques.micro_batch import MicroBatch
from plimsoll.techniques.optimizer_in_backward import OptimizerInBackward
from plimsoll.techniques.optimizer_kernel import OptimizerKernel
from plimsoll.techniques.optimizer_offload import OptimizerOffload
from plimsoll.techniques.packed_stretches import PackedStretches
from plimsoll.techniques.parameter_offload import ParameterOffload
from plimsoll.techniques.time_segments import TimeSegments
from plimsoll.techniques.truncated_bptt import TruncatedBptt

__all__ = [
    "CARRIED_ON", "FORGETFUL", "ONLY_IN", "TECHNIQUES", "UNOFFERED", "UNTRACED", "Choices", "Setting", "Technique",
    "conflict_among", "in_order", "installed", "technique_of",
]  # fmt: skip

TECHNIQUES: dict[str, Technique] = {
    technique.name: technique
    for technique in (
        Autocast(),
        Lora(),
        AdaptiveSoftmax(),
        Adafactor(),
        LowBitOptimizer(),
        FullyShard(),
        MicroBatch(),
        ByLength(),
        OptimizerKernel(),
        OptimizerOffload(),
        ParameterOffload(),
        LayerStreaming(),
        Attention(),
        ChunkedLoss(),
        TruncatedBptt(),
        TimeSegments(),
        PackedStretches(),
        Checkpointing(),
        GradientCache(),
        ActivationOffload(),
        OptimizerInBackward(),
        CudaGraph(),
        EvaluationPass(),
        Heap(),
        Allocator(),
        Cache(),
    )
}

UNTRACED = (Heap.name, Allocator.name)
"""How memory is handed out: these change no op, so that any of them can be counted on a trace that is there."""

ONLY_IN: dict[str, frozenset[Phase]] = {
    "optimizer_kernel": frozenset({"optimizer"}),
    "evaluation": frozenset({"evaluation"}),
}
"""Those that change nothing but one part of a training."""

FORGETFUL = frozenset({
    "micro_batch", "autocast", "lora", "adaptive_softmax", "adafactor", "low_bit_optimizer", "optimizer_kernel",
    "optimizer_offload", "parameter_offload", "layer_streaming", "attention", "chunked_loss", "checkpointing",
    "activation_offload", "evaluation", "heap", "allocator", "cache",
})  # fmt: skip
"""Those that keep nothing from one forward and backward pass to the next: passes on the same values do the same."""

CARRIED_ON = frozenset({"layer_streaming", "activation_offload"})
"""Those that begin in one block what ends in the next, so that blocks that look alike do not do the same."""

UNOFFERED: dict[str, dict[str, Value]] = {
    "fully_shard": {"dtype": "kept", "offload": "none"},
    "gradient_cache": {"part": FOUND},
    "time_segments": {"kept": 0},
    "allocator": {"max_split_size_mb": 0, "roundup_power2_divisions": 0},
}
"""Options that a menu leaves out where they seldom pay, and what they then are."""


def technique_of(name: str) -> Technique:
    """Return a technique by its name.

    Raises:
        InputError: if there is none; it names the nearest.
    """
    require_technique(name, TECHNIQUES)
    return TECHNIQUES[name]


def in_order(choices: Iterable[Choice]) -> Choices:
    """Sort choices into the order of installation.

    Raises:
        InputError: if there is no such technique (see `technique_of`).
    """
    order = list(TECHNIQUES)
    return tuple(sorted(choices, key=lambda choice: order.index(technique_of(choice.technique).name)))


def conflict_among(choices: Choices, workload: Workload, setting: Setting) -> str | None:
    """The first reason why choices cannot be installed together, or ``None``."""
    for number, choice in enumerate(choices):
        others = choices[:number] + choices[number + 1 :]
        reason = technique_of(choice.technique).conflicts(choice, others, workload, setting)
        if reason is not None:
            return f"{choice}: {reason}"
    return None


@contextmanager
def installed(workload: Workload, choices: Iterable[Choice]) -> Iterator[None]:
    """Put techniques to work, in order; on exit the workload is exactly as it was."""
    with ExitStack() as stack:
        for choice in in_order(choices):
            stack.enter_context(technique_of(choice.technique).install(workload, choice))
        yield
