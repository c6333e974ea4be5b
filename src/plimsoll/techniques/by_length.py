"""Micro-batches of samples of similar length, trimmed to the longest; the shorter the samples, the more in each.

It only reorders the samples within the batch of one optimizer step. It is for transformers models, and for models that
ignore padding on the right. A class declares this with ``ignores_padding = True``, as the recurrent models of
`plimsoll.models` do.

Numerics: samples are summed in another order; dropout draws other masks, as with every other split of the batch. Does
NOT cover models whose result depends on the padding (`_SENSITIVE` lists architectures of transformers), padding on the
left, and losses that count padding.
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
"""Architectures of transformers 5.23 whose loss changes with padding on the right, each with the reason.

Found by a comparison of every sequence classifier and causal language model that can be built small, with large random
weights in float64. The relative change of the loss is 3e-4 to 0.5 for these and below 3e-7 for all others.
canine, reformer and xlnet cannot be built small; they are listed because of their code."""


class ByLength(Technique):
    """`Technique`: group samples of similar length into trimmed micro-batches."""

    name = "by_length"
    numerics = "reordered"
    summary = "samples of similar length in one pass, without the padding that they share"
    may_be_allowed = True
    modifies = frozenset({"batch cut"})
    reaches = frozenset({"activations", "temporaries", "inputs"})
    needs = frozenset({"step"})
    works_on_shards = True
    cuts_by_length = True
    not_captured = "micro-batches of samples of similar length have many different shapes"
    leaves_out_work = True
    by_hand = "sort samples by length in the loader (group_by_length in the Trainer)"
    remedies: ClassVar = {"padding": 0}
    stage = "batch"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice, if the model is known to ignore padding, or the job allows it."""
        if not setting.lengths_vary:
            return "no attention_mask shows that the samples of a batch have different lengths"
        reason = _sensitive(workload.model) or (workload.kept_whole and str(workload.kept_whole))
        if reason is not None:
            return reason
        if self.name in setting.allow:
            return (Choice(technique=self.name),)
        if not _is_known(workload.model):
            return (
                f"it is unknown whether {type(workload.model).__name__} ignores padding on the right: if it does, set "
                "`allow: [by_length]` in the job, or `ignores_padding = True` in its class"
            )
        if callable(workload.units) or workload.loss is not model_loss:
            return (
                "the loss or its normalizer (units) is a custom function, which may count padding: if it does not, set "
                "`allow: [by_length]` in the job"
            )
        return (Choice(technique=self.name),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the model's result depends on padding, or the batch must not be split."""
        return _sensitive(workload.model) or (workload.kept_whole.why if workload.kept_whole else None)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Make the step split batches by length."""
        with hooked(workload, replace(workload.hooks, cut=CutByLength(workload.full_length))):
            yield


def _model_type(model: nn.Module) -> str | None:
    """Return the architecture of a transformers model, or ``None`` for other models."""
    found = getattr(getattr(model, "config", None), "model_type", None)
    return found if isinstance(found, str) else None


def _is_known(model: nn.Module) -> bool:
    return getattr(model, "ignores_padding", False) is True or _model_type(model) is not None


def _sensitive(model: nn.Module) -> str | None:
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return "the model has BatchNorm, whose statistics include padding"
    counted = counts_rows(model)
    if counted is not None:
        return str(counted)
    why = _SENSITIVE.get(_model_type(model) or "")
    return None if why is None else f"padding changes the result of {_model_type(model)}: it {why}"
