"""Losses that are known to be additive over the parts of a batch, or known not to be, judged by their code.

Known to be additive are Plimsoll's models and losses, and transformers models under these conditions: the class and its
loss function are from transformers, the loss has no further term, and the user's units are correct. The units depend on
the loss function and not on the name of the class: decoders such as `BartForCausalLM` do not shift their labels.
Nothing is known if a module, a hook, a replaced forward or a loss function is user code. The balance term of a router
(mixture of experts) is known not to be additive.

No loss is computed here; `plimsoll.step.losses.additive` compares losses. Does not detect functions that a user has
registered with transformers by name (an attention, an activation).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from plimsoll.data.batch import IGNORED_LABEL, Units
from plimsoll.models.hugging_face import is_hugging_face
from plimsoll.models.workload import Reason, Workload, model_loss

_OF_FUNCTIONS: dict[str, Units] = {
    "ForCausalLMLoss": "next-tokens",
    "ForMaskedLMLoss": "tokens",
    "ForTokenClassification": "tokens",
    "ForSequenceClassificationLoss": "samples",
}
"""The units (loss normalizer) that each loss function of transformers averages over."""

_OF_CROSS_ENTROPY: dict[str, Units] = {
    "ForMaskedLM": "tokens",
    "ForTokenClassification": "tokens",
    "ForSequenceClassification": "samples",
}
"""The units (loss normalizer) of transformers classes that compute a cross entropy themselves, by name ending.

Causal language models of this kind are unknown: they compare a position with its label or with the next label.
"""

_OF_OWN: dict[str, Units] = {
    "RecurrentLanguageModel": "next-tokens",
    "RecurrentLabeller": "tokens",
    "RecurrentClassifier": "samples",
}
"""The units (loss normalizer) of Plimsoll's models, by class name."""

_LIBRARIES = ("torch", "transformers", "peft", "plimsoll")
_MORE_TERMS = re.compile("aux|router|balanc|z_loss|contrastive|diversity")  # in a forward that adds terms to the loss
_FIELDS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ROW_BY_ROW = {
    "activation", "container", "conv", "dropout", "linear", "normalization", "padding", "pooling", "sparse"
}  # fmt: skip
"""Modules of ``torch.nn.modules`` whose layers compute each sample separately, except those in `_ACROSS`."""

_ACROSS = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin)
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def known_additive(workload: Workload) -> bool:
    """Return whether the loss of a training run is known to be additive. Call it before techniques are installed."""
    units = workload.units
    return isinstance(units, str) and _is_own(workload.loss) and known_units(workload.model) == units


def known_units(model: nn.Module) -> Units | None:
    """Return the units that the loss of a model averages over.

    Returns ``None`` if the units are unknown or the loss has another term.
    """
    plain = _plain(model)
    if not _is_unchanged(model) or _has_virtual_tokens(model):
        return None
    return _OF_OWN.get(type(plain).__name__) if _is_own(plain) else _units_of_head(plain)


def shifts_labels(model: nn.Module) -> bool:
    """Return whether a model compares each position with the next label, judged by its loss function or class name."""
    plain = _plain(model)
    if is_hugging_face(plain) and "_loss_function" not in vars(plain):
        if "loss_function" in _names_in_forward(plain):
            return bool(_OF_FUNCTIONS.get(_name_of(plain.loss_function)) == "next-tokens")
        if type(plain).__module__.startswith("transformers.models."):
            return False
    return type(plain).__name__.endswith(_CAUSAL)


def known_reason(workload: Workload) -> Reason | None:
    """Return why the loss of a training run is known not to be additive; ``None`` if this is not known."""
    model = _plain(workload.model)
    coefficient = _router_coefficient(model)
    if workload.loss is not model_loss or not coefficient:
        return None
    return Reason(
        f"the loss of {type(model).__name__} has a balance term of its router (output_router_logits=True, "
        f"router_aux_loss_coef={coefficient:g}), which changes when a batch is cut",
        "set output_router_logits=False in the model's config, or allow a changed term with recut_loss=True (job.yaml: "
        "allow: [recut_loss])",
    )


def is_usual(batch: Any, workload: Workload) -> bool:
    """Return whether a loss known from its code is additive for this batch, judged by fields and ignored labels."""
    if workload.loss is not model_loss or not is_hugging_face(_plain(workload.model)):
        return True
    if not isinstance(batch, Mapping) or set(batch) - _FIELDS:
        return False
    labels = batch.get("labels")
    ignores = isinstance(labels, Tensor) and bool((labels == IGNORED_LABEL).any())
    return not (ignores and workload.units == "samples")


def _is_own(thing: Any) -> bool:
    """Return whether a loss or a model is part of Plimsoll."""
    if thing is model_loss:
        return True
    kind = type(thing) if not inspect.isfunction(thing) else thing
    return str(getattr(kind, "__module__", "")).startswith("plimsoll.models.")


def _plain(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of ``torch.compile`` and adapters."""
    model = getattr(model, "_orig_mod", model)
    of_peft = type(model).__module__.startswith("peft.")
    return model.get_base_model() if of_peft and hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _has_virtual_tokens(model: nn.Module) -> bool:
    """Return whether peft puts tokens before the text, so that the first labelled token is predicted, too."""
    configs = getattr(getattr(model, "_orig_mod", model), "peft_config", {})
    return isinstance(configs, Mapping) and any(getattr(one, "is_prompt_learning", False) for one in configs.values())


def _units_of_head(model: nn.Module) -> Units | None:
    if not is_hugging_face(model) or not type(model).__module__.startswith("transformers.models."):
        return None
    names = _names_in_forward(model)
    if any(map(_MORE_TERMS.search, names)) and getattr(model.config, "output_router_logits", True):
        return None
    if "loss_function" in names:
        function = model.loss_function
        return _OF_FUNCTIONS.get(_name_of(function)) if all(map(is_of_library, _calls_of(function))) else None
    name = type(model).__name__
    found = (units for end, units in _OF_CROSS_ENTROPY.items() if name.endswith(end))
    return next(found, None) if "CrossEntropyLoss" in names else None


def _calls_of(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a loss function of transformers and the functions that it calls to compute the cross entropy."""
    yield function
    yield nn.functional.cross_entropy
    inside = getattr(sys.modules[function.__module__], "fixed_cross_entropy", None)
    if inside is not None:
        yield inside


def _is_unchanged(model: nn.Module) -> bool:
    """Return whether all modules of a model are unmodified library code, and none computes across samples."""
    every = nn.modules.module
    if every._global_forward_hooks or every._global_forward_pre_hooks or every._global_backward_hooks:
        return False
    is_own = _is_own(_plain(model))
    parts = getattr(model, "_orig_mod", model).modules()
    return all(_is_unchanged_part(part) and (is_own or not _may_mix_samples(part)) for part in parts)


def _is_unchanged_part(part: nn.Module) -> bool:
    kind = type(part)
    hooks = (hook for name in _HOOKS for hook in getattr(part, name).values())
    kept = (value for value in vars(part).values() if inspect.isroutine(value) or isinstance(value, partial))
    return (
        kind.__module__.partition(".")[0] in _LIBRARIES
        and "forward" not in vars(part)
        and all(map(is_of_library, (kind.forward, kind.__call__, *hooks, *kept)))
    )


def _may_mix_samples(part: nn.Module) -> bool:
    """Return whether a torch module may use the first dimension for something other than samples."""
    parents, _, kind = type(part).__module__.rpartition(".")
    return parents == "torch.nn.modules" and (kind not in _ROW_BY_ROW or isinstance(part, _ACROSS))


def is_of_library(function: Any) -> bool:
    """Return whether a function, and each function it wraps, is library code, even if it was renamed."""
    function = function.func if isinstance(function, partial) else function
    function = getattr(function, "__func__", function)
    if inspect.isbuiltin(function):
        return True
    if not inspect.isfunction(function):
        return type(function).__module__.partition(".")[0] in _LIBRARIES
    home = function.__globals__.get("__name__", "").partition(".")[0]
    inside = getattr(function, "__wrapped__", None)
    return home in _LIBRARIES and (inside is None or is_of_library(inside))


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", ""))


def _names_in_forward(model: nn.Module) -> set[str]:
    return set(inspect.unwrap(type(model).forward).__code__.co_names)


def _router_coefficient(model: nn.Module) -> float:
    if not is_hugging_face(model) or not getattr(model.config, "output_router_logits", False):
        return 0.0
    return float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0)
