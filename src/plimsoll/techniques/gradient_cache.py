"""Gradient caching: a batch is embedded in slices, and the loss is computed from all embeddings at once.

    Choice(technique="gradient_cache", options={"samples": 16})

Some losses compare the samples of a batch (in-batch negatives, CLIP, triplets over a batch, Barlow Twins, VICReg). Such
a loss cannot be computed in micro-batches, but each sample is embedded independently. So the batch is embedded slice by
slice without a graph, and the loss is computed from all embeddings. Backward embeds each slice again, with a graph, and
runs backward through it from the gradient of its embeddings (GradCache, Gao et al. 2021,
https://arxiv.org/abs/2101.06983).

Numerics: kernels for fewer rows round differently. Dropout masks are drawn per slice, and are the same in backward as
in forward. Does NOT cover encoders with BatchNorm or other statistics of a pass, and compiled models. Outputs must be
tensors, or dicts, lists and tuples of tensors.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from torch import nn

from plimsoll.errors import InputError, PlimsollWarning
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.former import warn_of_former
from plimsoll.records.plan import MICRO_BATCH, Choice, micro_batch_choice
from plimsoll.techniques.by_length import ByLength
from plimsoll.techniques.fully_shard import FullyShard
from plimsoll.techniques.layer_streaming import LayerStreaming
from plimsoll.techniques.mechanisms.blocks import blocks_of
from plimsoll.techniques.mechanisms.forwards import replaced_forward
from plimsoll.techniques.mechanisms.sliced import SlicedForward, Slicing
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique
from plimsoll.techniques.mechanisms.uncuttable import counts_rows
from plimsoll.techniques.optimizer_in_backward import OptimizerInBackward

FOUND = "found"
_STEP = 4  # ratio of consecutive sizes that are offered


class GradientCache(Technique):
    """`Technique`: embed a batch in slices, and again in backward, for a loss that compares all embeddings."""

    name = "gradient_cache"
    numerics = "reordered"
    summary = "the batch embedded in slices, and again in backward; the loss sees all embeddings"
    modifies = frozenset({"model"})
    reaches = frozenset({"activations", "temporaries"})
    excludes: ClassVar = {
        ByLength.name: "by_length cuts the batch, and its loss with it",
        FullyShard.name: "sharded blocks would be gathered again for each slice",
        LayerStreaming.name: "blocks would be copied to the device again for each slice",
        OptimizerInBackward.name: "gradients are summed over slices, and are complete only after the last one",
    }
    is_for_trainers = True
    not_captured = "Python loops over the slices"
    is_for_whole_batches = True
    unoffered: ClassVar = {"part": FOUND}

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return choices of slices with a quarter of the batch, a sixteenth, and so on down to single samples."""
        if setting.batch_size == 1:
            return "a batch of one sample cannot be sliced"
        reason = _why_not(workload, FOUND)
        if reason is None and setting.ask_rows is not None:
            reason = setting.ask_rows(refusal_of)
        if reason is not None:
            return reason
        sizes, size = list[int](), setting.batch_size
        while size > 1:
            size = -(-size // _STEP)
            sizes.append(size)
        return tuple(gradient_cache_choice(size) for size in sizes)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if ``samples`` is below 1, no module can embed samples, or another technique excludes it."""
        size = int(choice.options["samples"])
        if size < 1:
            return f"a slice of {size} samples is empty: give 1 or more"
        for other in others:
            if other.technique == MICRO_BATCH and int(other.options["samples"]) < setting.batch_size:
                return (
                    f"micro-batches of {other.options['samples']} of {setting.batch_size} samples cut the batch "
                    "already, and its loss with it"
                )
            if other.technique in self.excludes:
                return self.excludes[other.technique]
        return _why_not(workload, str(choice.options.get("part", FOUND)))

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Replace the forward of the modules that may compute the embeddings, on the instances.

        Raises:
            InputError: if the model has no such module.
        """
        part = str(choice.options.get("part", FOUND))
        reason = _why_not(workload, part)
        if reason is not None:
            raise InputError(f"cannot embed in slices: {reason}; leave {choice} out")
        slicing = Slicing(int(choice.options["samples"]))
        with _sliced(workload, part, slicing):
            yield
        if slicing.num_whole and not slicing.num_sliced:
            text = f"{choice} saved nothing: {_no_rows(workload)}: leave gradient_cache out"
            warnings.warn(text, PlimsollWarning, stacklevel=3)


@contextmanager
def _sliced(workload: Workload, part: str, slicing: Slicing) -> Iterator[None]:
    with ExitStack() as stack:
        for name, module in _parts(workload, part):
            stack.enter_context(replaced_forward(module, SlicedForward(name, module, slicing)))
        yield


def refusal_of(workload: Workload, rows: Any) -> str | None:
    """Compute the loss of ``rows``, a few samples, in slices of one sample.

    Return the reason why this fails, or ``None`` if it succeeds.
    """
    slicing = Slicing(1)
    try:
        with _sliced(workload, FOUND, slicing):
            workload.loss(workload.model, rows)
    except InputError as error:
        return str(error)
    return None if slicing.num_sliced else _no_rows(workload)


def gradient_cache_choice(samples: int) -> Choice:
    """Return the choice of slices with this many samples."""
    return Choice(technique=GradientCache.name, options={"samples": samples})


def gradient_cache_fallbacks(batch_size: int, samples: int) -> tuple[Choices, ...]:
    """Return fallbacks for a custom training loop: slices of `samples`, halved each time that memory runs out.

        step = plimsoll.TrainStep(model, optimizer, loss, units="samples", fallbacks=gradient_cache_fallbacks(512, 32))

    Args:
        batch_size: Number of samples of the largest batch; no batch is split.
        samples: Number of samples per slice.
    """
    sizes = [samples]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return tuple((micro_batch_choice(batch_size), gradient_cache_choice(size)) for size in sizes)


def _parts(workload: Workload, part: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that may embed: the module named ``part``, or candidates if ``part`` is `FOUND`.

    The candidates are all composite modules, outermost first, except inside repeated blocks.

    The model itself is excluded if its forward takes labels and returns the loss. The calls during a step show which
    module computes the embeddings (`mechanisms.sliced`). A module that does not compute each row independently is
    refused there.
    """
    model = workload.model
    if part != FOUND:
        return [(part, model.get_submodule(part))]
    of_blocks = {id(inner) for _, block in blocks_of(model) for inner in block.modules() if inner is not block}
    return [
        (name or type(model).__name__, module)
        for name, module in model.named_modules()
        if id(module) not in of_blocks and _is_called(module) and (module is not model or not _returns_loss(workload))
    ]


def _returns_loss(workload: Workload) -> bool:
    """Return whether the model's forward computes the loss. The loss of a custom loop may be computed elsewhere."""
    return workload.loss is model_loss and "labels" in inspect.signature(type(workload.model).forward).parameters


def _is_called(module: nn.Module) -> bool:
    """Return whether a module is worth slicing: neither a container that is never called nor a single layer."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _no_rows(workload: Workload) -> str:
    return f"no module of {type(workload.model).__name__} returns one row for each input row, as an encoder does"


def _why_not(workload: Workload, part: str) -> str | None:
    model = workload.model
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        return "the model is compiled"
    if part != FOUND and part not in dict(model.named_modules()):
        return f"the model has no part `{part}`"
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return "BatchNorm would compute its statistics from one slice"
    reason = counts_rows(model)
    if reason is not None:
        return reason.why
    if not _parts(workload, part):
        return f"{type(model).__name__} has no module that could embed: only the model itself has submodules"
    return None


def __getattr__(name: str) -> Any:
    if name != "gradient_cache_rungs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_of_former(name, "gradient_cache_fallbacks")
    return gradient_cache_fallbacks
