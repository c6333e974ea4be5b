"""Gradient caching: a batch is embedded in slices, and its loss is that of all embeddings.

    Choice(technique="gradient_cache", options={"samples": 16})

A loss that compares the samples of a batch (in-batch negatives, CLIP, triplets over a batch, Barlow Twins, VICReg)
cannot be cut, but each sample is embedded by itself. So the batch is embedded a slice at a time without a graph, the
loss is taken of all embeddings, and backward embeds each slice again and goes on from the gradient of its embeddings
(GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983).

Numerics: kernels for fewer rows round otherwise. Dropout draws slice by slice, the same in backward as in forward. Does
NOT cover BatchNorm and other statistics of a pass inside of what embeds, models that are compiled, and results that are
neither tensors nor dicts, lists and tuples of them.
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
_STEP = 4  # between the sizes that are offered


class GradientCache(Technique):
    """`Technique`: embed a batch in slices, and again in backward, for a loss of all embeddings."""

    name = "gradient_cache"
    numerics = "reordered"
    summary = "the batch embedded in slices, and again in backward; the loss is of all embeddings"
    modifies = frozenset({"model"})
    reaches = frozenset({"activations", "temporaries"})
    excludes: ClassVar = {
        ByLength.name: "by_length cuts the batch, and its loss with it",
        FullyShard.name: "blocks that are shared out over the ranks would be gathered for each slice anew",
        LayerStreaming.name: "blocks would come to the device for each slice anew",
        OptimizerInBackward.name: "gradients add up over slices, and are complete in the last one only",
    }
    is_for_trainers = True
    not_captured = "Python goes on from slice to slice"
    is_for_whole_batches = True
    unoffered: ClassVar = {"part": FOUND}

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Slices of a quarter of the batch, a sixteenth, and so on down to single samples."""
        if setting.batch_size == 1:
            return "a batch of one sample has no slices"
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
        """A slice has samples; nothing else cuts the batch, or needs complete gradients before backward ends."""
        size = int(choice.options["samples"])
        if size < 1:
            return f"a slice of {size} samples is none: give 1 or more"
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
        """Replace the forward of what may embed, on the instances.

        Raises:
            InputError: if there is nothing that could be.
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
    """Compute the loss of a few samples in slices of one; returns why that cannot be, or ``None``."""
    slicing = Slicing(1)
    try:
        with _sliced(workload, FOUND, slicing):
            workload.loss(workload.model, rows)
    except InputError as error:
        return str(error)
    return None if slicing.num_sliced else _no_rows(workload)


def gradient_cache_choice(samples: int) -> Choice:
    """The choice of slices of so many samples."""
    return Choice(technique=GradientCache.name, options={"samples": samples})


def gradient_cache_fallbacks(batch_size: int, samples: int) -> tuple[Choices, ...]:
    """Return the fallbacks of a training by hand: slices of so many samples and, when memory runs out, of half as many.

        step = plimsoll.TrainStep(model, optimizer, loss, units="samples", fallbacks=gradient_cache_fallbacks(512, 32))

    Args:
        batch_size: samples of the largest batch, which stays whole.
        samples: of a slice.
    """
    sizes = [samples]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return tuple((micro_batch_choice(batch_size), gradient_cache_choice(size)) for size in sizes)


def _parts(workload: Workload, part: str) -> list[tuple[str, nn.Module]]:
    """What may embed, outermost first: modules that have parts, but for what is inside of repeated blocks.

    The model itself is none where its forward takes labels and returns the loss. Which one embeds is found in the calls
    of a step (`mechanisms.sliced`), and refused there if it does not compute each row by itself.
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
    """Whether the model's forward is the loss; a loop that is someone else's may have a loss that nobody knows."""
    return workload.loss is model_loss and "labels" in inspect.signature(type(workload.model).forward).parameters


def _is_called(module: nn.Module) -> bool:
    """Whether a module computes something that is worth it: no list, and no single layer."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _no_rows(workload: Workload) -> str:
    return f"no part of {type(workload.model).__name__} returns one row for each of its rows, as an encoder does"


def _why_not(workload: Workload, part: str) -> str | None:
    model = workload.model
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        return "the model is compiled"
    if part != FOUND and part not in dict(model.named_modules()):
        return f"the model has no part `{part}`"
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return "BatchNorm's statistics would be those of a slice"
    reason = counts_rows(model)
    if reason is not None:
        return reason.why
    if not _parts(workload, part):
        return f"{type(model).__name__} has no part that could embed: no module with parts but the one of the loss"
    return None


def __getattr__(name: str) -> Any:
    if name != "gradient_cache_rungs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_of_former(name, "gradient_cache_fallbacks")
    return gradient_cache_fallbacks
