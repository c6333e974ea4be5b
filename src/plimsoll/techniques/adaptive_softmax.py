"""An adaptive softmax in place of a recurrent language model's output layer: rare words have few features.

Grave et al. 2017 (arXiv:1609.04309): the most frequent words remain outputs, and each cluster of rarer words adds one
output. The words of a cluster have a quarter (1 / ``div_value``) of the features of the previous cluster. Their outputs
are computed only for labels in the cluster. `plimsoll.models.adaptive` defines the loss.

**Token ids must be sorted by frequency.** A trained ``words`` tokenizer sorts them, and a ``bpe`` tokenizer does so
roughly. In another order, frequent words have few features, which is slower and learns worse.

On exit the original output layer is restored, and the trained one is discarded. Does NOT cover tied weights, output
layers that are frozen or have hooks, and models of other libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import ClassVar

import torch
from torch import nn

from plimsoll.models.adaptive import DIV_VALUE, adaptive_head, cutoffs_fault, default_cutoffs
from plimsoll.models.recurrent.model import RecurrentConfig, RecurrentLanguageModel
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.chunked_loss import ChunkedLoss
from plimsoll.techniques.mechanisms.frozen_base import KeptOutside
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

AUTO = "auto"
"""The value of ``cutoffs`` for cutoffs that are computed from the vocabulary size, once the text has been read."""

_FEWEST_WORDS = 1024
"""The technique does not pay off for a smaller vocabulary: see `plimsoll.techniques.chunked_loss`."""


class AdaptiveSoftmax(Technique):
    """`Technique`: replace a large output layer with clusters of words by frequency."""

    name = "adaptive_softmax"
    numerics = "lossy"
    summary = "adaptive softmax: rare words have fewer features; token ids must be sorted by frequency"
    modifies = frozenset({"model", "optimizer"})
    reaches = frozenset({
        "activations", "temporaries", "parameters", "gradients", "optimizer states"
    })  # fmt: skip
    is_for_the_run = True
    excludes: ClassVar = {
        ChunkedLoss.name: "chunked_loss needs the output layer that it replaces, and it never computes all logits"
    }
    not_captured = "the words of each cluster depend on the values of the labels"
    may_be_faster = True
    keeps_state_between_passes = False
    by_hand = "build the model with nn.AdaptiveLogSoftmaxWithLoss"
    remedies: ClassVar = {"embeddings": 0}
    stage = "model"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice, with clusters computed from the vocabulary. Other clusters can be pinned."""
        options: dict[str, int | float | str | bool] = {"cutoffs": AUTO, "div_value": DIV_VALUE}
        return _impossible(workload) or (Choice(technique=self.name, options=options),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the job does not allow this technique, or an option or another technique excludes it."""
        if self.name not in setting.allow:
            return "it is lossy: allow it with `allow: [adaptive_softmax]`"
        reason = _impossible(workload)
        if reason is not None:
            return reason
        div_value = choice.options.get("div_value", DIV_VALUE)
        if not isinstance(div_value, int | float) or isinstance(div_value, bool) or div_value < 1:
            return f"div_value is {div_value}: give a number of 1 or more"
        excluded = self.excluded(others)
        if excluded is not None:
            return excluded
        assert isinstance(workload.model, RecurrentLanguageModel)
        config = workload.model.config
        cutoffs = _cutoffs(choice, config)
        if cutoffs is None:
            return f"cutoffs are {choice.options['cutoffs']}: give numbers of words such as 2000,10000, or {AUTO}"
        return cutoffs_fault(cutoffs, config.vocab_size, config.hidden_size, div_value)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Replace the output layer, in the model and in the optimizer."""
        model = workload.model
        assert isinstance(model, RecurrentLanguageModel)
        given, config, kept = model.head, model.config, KeptOutside()
        assert isinstance(given, nn.Linear)
        weight = given.weight
        assert isinstance(weight, nn.Parameter)
        cutoffs = _cutoffs(choice, config)
        assert cutoffs is not None
        div_value = float(choice.options.get("div_value", DIV_VALUE))
        fields = {"adaptive_cutoffs": cutoffs, "adaptive_div_value": div_value}
        new = _head_like(given, cutoffs, div_value)
        with ExitStack() as stack:
            stack.callback(kept.bring_back)  # runs last, after the new output layer has been freed
            stack.enter_context(_exchanged(workload.optimizer, list(given.parameters()), list(new.parameters())))
            stack.callback(setattr, model, "head", given)
            stack.callback(setattr, model, "config", config)
            # The configuration must describe the new output layer, so that the model can be saved and loaded.
            model.head, model.config = new, config.model_copy(update=fields)
            kept.take(weight)
            yield


def _cutoffs(choice: Choice, config: RecurrentConfig) -> tuple[int, ...] | None:
    """Return the cutoffs of a choice, or ``None`` if the text of its option ``cutoffs`` is invalid.

    Default cutoffs have one cluster instead of two if the rarest words would have less than one feature.
    """
    text = str(choice.options.get("cutoffs", AUTO))
    if text == AUTO:
        cutoffs, div_value = default_cutoffs(config.vocab_size), float(choice.options.get("div_value", DIV_VALUE))
        return cutoffs if config.hidden_size >= div_value ** len(cutoffs) else cutoffs[:1]
    words = text.replace(" ", "").split(",")
    return tuple(map(int, words)) if all(map(str.isdecimal, words)) else None


def _impossible(workload: Workload) -> str | None:
    model = workload.model
    if not isinstance(model, RecurrentLanguageModel):
        return f"a {type(model).__name__} is not a recurrent language model of Plimsoll, and others are not supported"
    head, config = model.head, model.config
    if not isinstance(head, nn.Linear):
        return "the model has an adaptive softmax"
    if head.weight is model.embedding.weight:
        return "the output layer shares the embedding's weights (tie_weights), and rare words would have fewer features"
    if config.vocab_size < _FEWEST_WORDS:
        return f"a vocabulary of {config.vocab_size} words is small: adaptive_softmax pays off from {_FEWEST_WORDS} on"
    return _head_fault(head, workload.optimizer)


def _head_fault(head: nn.Linear, optimizer: torch.optim.Optimizer) -> str | None:
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks:
        return "the output layer has hooks, which would not be called"
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not all(parameter.requires_grad and parameter in trained for parameter in head.parameters()):
        return "the output layer is frozen, or not in the optimizer"
    return None


def _head_like(given: nn.Linear, cutoffs: tuple[int, ...], div_value: float) -> nn.AdaptiveLogSoftmaxWithLoss:
    """Return a new output layer with the given layer's weights for frequent words, and new weights otherwise."""
    with torch.device(given.weight.device):
        new = adaptive_head(given.in_features, given.out_features, cutoffs, div_value)
    new = new.to(given.weight.dtype).train(given.training)
    with torch.no_grad():
        for own, its in ((new.head.weight, given.weight), (new.head.bias, given.bias)):
            if its is not None:
                own[: cutoffs[0]].copy_(its[: cutoffs[0]])
    return new


@contextmanager
def _exchanged(optimizer: torch.optim.Optimizer, old: list[nn.Parameter], new: list[nn.Parameter]) -> Iterator[None]:
    """Replace the parameters ``old`` of an optimizer by ``new`` while the block runs.

    The new parameters join the group of the first old parameter.
    """
    members = [group["params"] for group in optimizer.param_groups]
    states = dict(optimizer.state)
    for group, before in zip(optimizer.param_groups, members, strict=True):
        has_first = any(parameter is old[0] for parameter in before)
        others = [parameter for parameter in before if not any(parameter is one for one in old)]
        group["params"] = others + (new if has_first else [])
    for parameter in old:
        optimizer.state.pop(parameter, None)
    try:
        yield
    finally:
        learned = dict(optimizer.state)
        optimizer.state.clear()
        optimizer.state.update({parameter: learned.get(parameter, state) for parameter, state in states.items()})
        for tensor, state in learned.items():  # created in the block, for a parameter that stays
            if not any(tensor is one for one in new):
                optimizer.state[tensor] = state
        for group, before in zip(optimizer.param_groups, members, strict=True):
            group["params"] = before
