"""The output layer and the cross entropy after it, a few tokens at a time: the logits never exist as a whole.

While it is installed, the forward of the model's output layer (a large ``nn.Linear`` to the vocabulary) returns logits
that are not computed (`mechanisms.lazy_logits`); ``F.cross_entropy`` of them goes over the tokens a chunk at a time
(`mechanisms.chunked_cross_entropy`). Model and loss need not know of it. Hooks of the layer fire as before and see lazy
logits.

Numerics: sums in another order; in bf16 and fp16 the weight's gradient is added up in fp32. Nothing is approximated.

Does NOT cover (the real logits are computed, as without it): losses that are no cross entropy, class weights,
probabilities as targets, soft capping and other functions between layer and loss; layers whose forward was replaced
before; torch.compile; layers whose weights are elsewhere by the time of the loss (FSDP, streaming).
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

# Fewer outputs than this are no vocabulary: their logits are small beside what the layers before leave.
_FEWEST_OUTPUTS = 1024
_LEAST_RATIO = 4
# On a CPU 256 tokens take as long as 1024, and half the memory: see docs/techniques/chunked_loss.md.
_CHUNK_TOKENS = {"cpu": (256, 64), "cuda": (1024, 256, 64)}


class ChunkedLoss(Technique):
    """`Technique`: compute the logits and their cross entropy in chunks of tokens."""

    name = "chunked_loss"
    numerics = "reordered"
    summary = "output layer and cross entropy a few tokens at a time, without all logits"
    modifies = frozenset({"model"})
    reaches = frozenset({"activations", "temporaries"})
    may_be_faster = True
    keeps_state_between_passes = False
    by_hand = "use torch.nn.functional.linear_cross_entropy or the Liger kernel"
    remedies: ClassVar = {"logits": 0}
    stage = "parts"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Chunks of some tokens, where the output layer is large and its loss a cross entropy."""
        found = find_head(workload.model)
        if isinstance(found, str):
            return found
        name, head = found
        if setting.trace is not None and not _has_cross_entropy(setting.trace, head.out_features):
            return f"the loss takes no cross entropy of the {head.out_features} outputs of `{name}`"
        return tuple(
            Choice(technique=self.name, options={"chunk_tokens": size}) for size in _CHUNK_TOKENS[setting.device]
        )

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """A chunk has at least one token; a head must be there."""
        size = int(choice.options["chunk_tokens"])
        if size < 1:
            return f"a chunk of {size} tokens is none: give 1 or more"
        found = find_head(workload.model)
        return found if isinstance(found, str) else None

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Let the output layer return lazy logits.

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
                f"chunked_loss saved nothing: no cross entropy was taken of the outputs of `{name}`, but "
                f"`{tally.asked_by}`, which needs all of them: leave chunked_loss out",
                PlimsollWarning,
                stacklevel=3,
            )


class _LazyForward:
    """A head's forward; an object, so that a copy of the model gets the copy of its own head."""

    is_linear = True  # of the layer's own weight: what goes over positions by itself may (`models.head_apart`)

    def __init__(self, head: nn.Linear, chunk_tokens: int, tally: Tally) -> None:
        self._head, self._chunk_tokens, self._tally = head, chunk_tokens, tally

    def __call__(self, input: Tensor) -> Tensor:
        return lazy_linear(self._head, input, self._chunk_tokens, self._tally)


def find_head(model: nn.Module) -> tuple[str, nn.Linear] | str:
    """Return the name and the output layer of a model, or a sentence that says why there is none to use.

    It is what a Hugging Face model calls its output embeddings, or else the one ``nn.Linear`` with more outputs than
    any other.
    """
    named = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if hasattr(model, "_orig_mod") or not named:
        return "the model is compiled" if named else "the model has no nn.Linear"
    if any(isinstance(module, nn.AdaptiveLogSoftmaxWithLoss) for module in model.modules()):
        return "the output layer is an adaptive softmax, which never has all logits itself"
    head = _declared_head(model)
    if head is None or head not in named:
        most = max(module.out_features for module in named)
        heads = [module for module in named if module.out_features == most]
        head = heads[0]
        if len(heads) > 1:
            return f"{len(heads)} layers have {most} outputs, more than any other: none of them is the output layer"
    name = named[head]
    if head.out_features < max(_FEWEST_OUTPUTS, _LEAST_RATIO * head.in_features):
        return (
            f"the largest layer, `{name}`, has {head.out_features} outputs of {head.in_features} inputs: chunks pay "
            f"from {_FEWEST_OUTPUTS} outputs and {_LEAST_RATIO} times the inputs on"
        )
    if "forward" in head.__dict__ or type(head).forward is not nn.Linear.forward:
        return f"the output layer `{name}` has a forward of its own ({type(head).__name__})"
    return name, head


def _declared_head(model: nn.Module) -> nn.Linear | None:
    declared = getattr(model, "get_output_embeddings", None)
    head = declared() if callable(declared) else None
    return head if isinstance(head, nn.Linear) else None


def _has_cross_entropy(trace: Trace, num_outputs: int) -> bool:
    """Whether some log softmax over so many outputs has its negative log likelihood taken, in chunks or not."""
    ops = {number for number, text in enumerate(trace.texts) if text.startswith("aten._log_softmax.")}
    has_loss = any(text.startswith(("aten.nll_loss_forward.", "aten.nll_loss2d_forward.")) for text in trace.texts)
    rows = zip(trace.storages.born, trace.storages.shape, strict=True)
    return has_loss and any(
        trace.ops.name[born] in ops and _has_extent(trace.texts[shape], num_outputs) for born, shape in rows
    )


def _has_extent(shape_text: str, extent: int) -> bool:
    """Whether a text like ``float32[8, 128, 768]`` has a dimension of that extent.

    >>> _has_extent("float32[8, 128]", 128), _has_extent("float32[8, 1280]", 128)
    (True, False)
    """
    sizes = shape_text.partition("[")[2].rstrip("]").split(", ")
    return str(extent) in sizes
