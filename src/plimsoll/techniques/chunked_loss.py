"""Output layer and cross entropy, computed for a few tokens at a time: the logits of all tokens never exist at once.

The forward of the model's output layer (a large ``nn.Linear`` to the vocabulary) returns lazy logits
(`mechanisms.lazy_logits`). ``F.cross_entropy`` of lazy logits computes the loss chunk by chunk
(`mechanisms.chunked_cross_entropy`). Model and loss need no changes. Hooks of the layer run as before and see lazy
logits.

Numerics: sums are in another order; in bf16 and fp16 the weight's gradient is accumulated in fp32. Nothing is
approximated.

The following are NOT covered, and compute the real logits: losses other than cross entropy; class weights;
probabilities as targets; soft capping and other functions between layer and loss. Also not covered: layers whose
forward has been replaced, torch.compile, and layers whose weights leave the device before the loss (FSDP, streaming).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor, nn

from plimsoll.errors import InputError, PlimsollWarning
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.records.trace import Trace
from plimsoll.techniques.mechanisms.lazy_logits import Tally, lazy_linear
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

# Below this, logits are small compared with the activations of the other layers.
_FEWEST_OUTPUTS = 1024
_LEAST_RATIO = 4
# On a CPU, 256 tokens take as long as 1024 and half the memory: see docs/techniques/chunked_loss.md.
_CHUNK_TOKENS = {"cpu": (256, 64), "cuda": (1024, 256, 64)}


class ChunkedLoss(Technique):
    """`Technique`: compute the logits and their cross entropy in chunks of tokens."""

    name = "chunked_loss"
    numerics = "reordered"
    summary = "output layer and cross entropy computed for a few tokens at a time, without full logits"
    modifies = frozenset({"model"})
    reaches = frozenset({"activations", "temporaries"})
    may_be_faster = True
    keeps_state_between_passes = False
    by_hand = "use torch.nn.functional.linear_cross_entropy or the Liger kernel"
    remedies: ClassVar = {"logits": 0}
    stage = "parts"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return choices of several chunk sizes, if the output layer is large and the loss is a cross entropy."""
        found = find_head(workload.model)
        if isinstance(found, str):
            return found
        name, head = found
        if setting.trace is not None and not _has_cross_entropy(setting.trace, head.out_features):
            return f"the loss computes no cross entropy of the {head.out_features} outputs of `{name}`"
        return tuple(
            Choice(technique=self.name, options={"chunk_tokens": size}) for size in _CHUNK_TOKENS[setting.device]
        )

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the chunk size is below 1, or the model has no large output layer."""
        size = int(choice.options["chunk_tokens"])
        if size < 1:
            return f"chunk_tokens is {size}: give 1 or more"
        found = find_head(workload.model)
        return found if isinstance(found, str) else None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Make the output layer return lazy logits.

        Raises:
            InputError: if there is no large output layer.
        """
        found = find_head(workload.model)
        if isinstance(found, str):
            raise InputError(f"cannot compute the loss in chunks: {found}; leave chunked_loss out")
        name, head = found
        tally = Tally()
        head.forward = _LazyForward(head, int(choice.options["chunk_tokens"]), tally)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del head.__dict__["forward"]
        if tally.asked_by is not None and tally.num_chunked == 0:
            warnings.warn(
                f"chunked_loss saved nothing: the outputs of `{name}` were not used by a cross entropy, but by "
                f"`{tally.asked_by}`, which needs all of them: leave chunked_loss out",
                PlimsollWarning,
                stacklevel=3,
            )


class _LazyForward:
    """The forward of an output layer that returns lazy logits.

    It is an object, not a closure, so that a deep copy of the model uses the copied layer.
    """

    is_linear = True  # still linear in the weight: `models.head_apart` may compute it in chunks itself

    def __init__(self, head: nn.Linear, chunk_tokens: int, tally: Tally) -> None:
        self._head, self._chunk_tokens, self._tally = head, chunk_tokens, tally

    def __call__(self, input: Tensor) -> Tensor:
        return lazy_linear(self._head, input, self._chunk_tokens, self._tally)


def find_head(model: nn.Module) -> tuple[str, nn.Linear] | str:
    """Return the name and the output layer of a model, or the reason why the model has no usable one.

    It is the layer that a Hugging Face model declares as its output embeddings, or else the one ``nn.Linear`` with the
    most outputs.
    """
    named = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if hasattr(model, "_orig_mod") or not named:
        return "the model is compiled" if named else "the model has no nn.Linear"
    if any(isinstance(module, nn.AdaptiveLogSoftmaxWithLoss) for module in model.modules()):
        return "the output layer is an adaptive softmax, which never computes all logits"
    head = _declared_head(model)
    if head is None or head not in named:
        most = max(module.out_features for module in named)
        heads = [module for module in named if module.out_features == most]
        head = heads[0]
        if len(heads) > 1:
            return f"{len(heads)} layers have {most} outputs, the most of all: it is unclear which is the output layer"
    name = named[head]
    if head.out_features < max(_FEWEST_OUTPUTS, _LEAST_RATIO * head.in_features):
        return (
            f"the largest layer, `{name}`, has {head.out_features} outputs and {head.in_features} inputs: chunks pay "
            f"off from {_FEWEST_OUTPUTS} outputs, and {_LEAST_RATIO} outputs per input"
        )
    if "forward" in head.__dict__ or type(head).forward is not nn.Linear.forward:
        return f"the output layer `{name}` has a custom forward ({type(head).__name__})"
    return name, head


def _declared_head(model: nn.Module) -> nn.Linear | None:
    declared = getattr(model, "get_output_embeddings", None)
    head = declared() if callable(declared) else None
    return head if isinstance(head, nn.Linear) else None


def _has_cross_entropy(trace: Trace, num_outputs: int) -> bool:
    """Return whether a trace has a log-softmax over `num_outputs` outputs and a negative log-likelihood."""
    ops = {number for number, text in enumerate(trace.texts) if text.startswith("aten._log_softmax.")}
    has_loss = any(text.startswith(("aten.nll_loss_forward.", "aten.nll_loss2d_forward.")) for text in trace.texts)
    rows = zip(trace.storages.born, trace.storages.shape, strict=True)
    return has_loss and any(
        trace.ops.name[born] in ops and _has_extent(trace.texts[shape], num_outputs) for born, shape in rows
    )


def _has_extent(shape_text: str, extent: int) -> bool:
    """Return whether a shape such as ``float32[8, 128, 768]`` has a dimension of size `extent`.

    >>> _has_extent("float32[8, 128]", 128), _has_extent("float32[8, 1280]", 128)
    (True, False)
    """
    sizes = shape_text.partition("[")[2].rstrip("]").split(", ")
    return str(extent) in sizes
