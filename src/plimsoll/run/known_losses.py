"""Losses that are known to be additive over the parts of a batch, or known not to be, from what computes them.

Known are: a model of transformers that computes its own loss, in a class of transformers' own, with the loss of its
task as transformers has it and no other term, of which the units are given rightly; Plimsoll's own models and losses.
The balance term of a router (mixture of experts) is known not to be. Of everything else nothing is known.

Does NOT look at values: see `plimsoll.run.additive`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from plimsoll.models.hugging_face import OTHER_LOSS, is_hugging_face
from plimsoll.workload import IGNORED_LABEL, Reason, Workload, model_loss

_UNITS = {
    "ForCausalLM": "next-tokens",
    "LMHeadModel": "next-tokens",
    "ForMaskedLM": "tokens",
    "ForTokenClassification": "tokens",
    "ForSequenceClassification": "samples",
    "RecurrentLanguageModel": "next-tokens",
    "RecurrentLabeller": "tokens",
    "RecurrentClassifier": "samples",
}
"""What the loss of a class of transformers, or of Plimsoll's, averages over, by the end of its name."""

_LOSSES = {"loss_function", "CrossEntropyLoss"}  # what the forward of such a class computes its loss with
_MORE_TERMS = re.compile("aux|router|balanc|z_loss|contrastive|diversity")  # names in a forward that has other terms
_FIELDS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"}
_REPLACED = "forward"  # an attribute of an instance, where somebody has put another forward in the place of the class's


def known_additive(workload: Workload) -> bool:
    """Whether the loss of a training is known to be additive; ask before techniques are installed."""
    model = _plain(workload.model)
    averaged = next((units for end, units in _UNITS.items() if type(model).__name__.endswith(end)), None)
    if not _is_own(workload.loss) or _REPLACED in vars(model) or averaged is None or workload.units != averaged:
        return False
    return _is_own(model) or _is_known_head(model)


def known_reason(workload: Workload) -> Reason | None:
    """Return why the loss of a training is known not to be additive, if it is."""
    model = _plain(workload.model)
    coefficient = _router_coefficient(model)
    if workload.loss is not model_loss or not coefficient:
        return None
    return Reason(
        f"the loss of {type(model).__name__} has a balance term of its router (output_router_logits=True, "
        f"router_aux_loss_coef={coefficient:g}), which is of the whole batch and another one in parts",
        "set output_router_logits=False in the model's config, or allow another term with recut_loss=True (job.yaml: "
        "allow: [recut_loss])",
    )


def is_usual(batch: Any, workload: Workload) -> bool:
    """Whether a batch has only fields of which is known what a model of transformers does with them."""
    if workload.loss is not model_loss or not is_hugging_face(_plain(workload.model)):
        return True
    if not isinstance(batch, Mapping) or set(batch) - _FIELDS:
        return False
    labels = batch.get("labels")
    ignores = isinstance(labels, Tensor) and bool((labels == IGNORED_LABEL).any())
    return not (ignores and workload.units == "samples")


def _is_own(thing: Any) -> bool:
    """Whether a loss or a model is Plimsoll's."""
    if thing is model_loss:
        return True
    kind = type(thing) if not inspect.isfunction(thing) else thing
    return str(getattr(kind, "__module__", "")).startswith("plimsoll.models.")


def _plain(model: nn.Module) -> nn.Module:
    """The model in what compiles it, or has put adapters into it."""
    model = getattr(model, "_orig_mod", model)
    of_peft = type(model).__module__.startswith("peft.")
    return model.get_base_model() if of_peft and hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _is_known_head(model: nn.Module) -> bool:
    if not is_hugging_face(model) or not type(model).__module__.startswith("transformers.models."):
        return False
    if "_loss_function" in vars(model):
        return False
    if model.config.model_type in OTHER_LOSS:
        return False
    names = set(inspect.unwrap(type(model).forward).__code__.co_names)
    has_more = any(map(_MORE_TERMS.search, names)) and getattr(model.config, "output_router_logits", True)
    return bool(names & _LOSSES) and not has_more


def _router_coefficient(model: nn.Module) -> float:
    if not is_hugging_face(model) or not getattr(model.config, "output_router_logits", False):
        return 0.0
    return float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0)
