"""Samples of alike length in one pass, without the padding that none of them needs: more of them where they are short.

Within the batch of one optimizer step: its samples, and the order of batches, stay the user's. It is for models of
transformers, and for those that say with ``ignores_padding = True`` in their class that padding on the right changes
nothing for them, as the recurrent ones of `plimsoll.models` do.

Numerics: samples are added up in another order; with dropout other masks are drawn, as with any other cut. Does NOT
cover models whose result depends on the padding (`_SENSITIVE` lists those of transformers), padding on the left, and
losses that count padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from torch import nn

from plimsoll.models.workload import Workload, hooked, model_loss
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.lengths import CutByLength
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique
from plimsoll.techniques.mechanisms.uncuttable import counts_rows

_SENSITIVE = {
    "canine": "convolves over the padding",
    "convbert": "convolves over the padding",
    "fnet": "mixes all positions",
    "funnel": "pools over the padding",
    "mobilebert": "joins each token with its neighbours",
    "nystromformer": "averages over segments of all positions",
    "reformer": "hashes all positions",
    "xlnet": "reads the last position",
    "yoso": "hashes all positions",
}
"""Architectures of transformers 5.23 whose loss with padding on the right is another than without, and why.

Found by building each sequence classifier and causal language model that can be built small, with large random weights
in float64, and comparing: these differ by 3e-4 to 0.5 of the loss, all others by less than 3e-7. canine, reformer and
xlnet, which could not be built so, are here for what their code does."""


class ByLength(Technique):
    """`Technique`: micro-batches by length, trimmed."""

    name = "by_length"
    numerics = "reordered"
    summary = "samples of alike length in one pass, without their common padding"
    may_be_allowed = True
    modifies = frozenset({"batch cut"})
    reaches = frozenset({"activations", "temporaries", "inputs"})
    needs = frozenset({"step"})
    works_on_shards = True
    cuts_by_length = True
    not_captured = "micro-batches of alike length have all kinds of shapes"
    leaves_out_work = True
    by_hand = "sort samples by length in the loader (group_by_length in the Trainer)"
    remedies: ClassVar = {"padding": 0}
    stage = "batch"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """One choice, for a model that is known to give the same result with and without padding."""
        if not setting.lengths_vary:
            return "nothing says that the samples of a batch are of different lengths: only an attention_mask does"
        reason = _sensitive(workload.model) or (workload.kept_whole and str(workload.kept_whole))
        if reason is not None:
            return reason
        if self.name in setting.allow:
            return (Choice(technique=self.name),)
        if not _is_known(workload.model):
            return (
                f"nothing is known of how {type(workload.model).__name__} treats padding: if padding on the right "
                "changes nothing, say so with `allow: [by_length]`, or with `ignores_padding = True` in its class"
            )
        if callable(workload.units) or workload.loss is not model_loss:
            return (
                "the loss, or what it averages over, is a function of yours, which may count padding: if it does not, "
                "say so with `allow: [by_length]`"
            )
        return (Choice(technique=self.name),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """A model whose result depends on the padding, and a loss that a cut changes."""
        return _sensitive(workload.model) or (workload.kept_whole.why if workload.kept_whole else None)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Say it to the step."""
        with hooked(workload, replace(workload.hooks, cut=CutByLength(workload.full_length))):
            yield


def _model_type(model: nn.Module) -> str | None:
    """The architecture of a transformers model, ``None`` of others."""
    found = getattr(getattr(model, "config", None), "model_type", None)
    return found if isinstance(found, str) else None


def _is_known(model: nn.Module) -> bool:
    return getattr(model, "ignores_padding", False) is True or _model_type(model) is not None


def _sensitive(model: nn.Module) -> str | None:
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return "the model has BatchNorm, whose statistics are of the padding too"
    counted = counts_rows(model)
    if counted is not None:
        return str(counted)
    why = _SENSITIVE.get(_model_type(model) or "")
    return None if why is None else f"padding changes the result of {_model_type(model)}: it {why}"
