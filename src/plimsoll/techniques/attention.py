"""Attention by torch's fused kernels in place of Hugging Face's eager code, which writes all scores to memory.

A transformers model whose config has ``eager`` attention runs ``torch.nn.functional.scaled_dot_product_attention``
instead (see https://huggingface.co/docs/transformers/attention_interface).

Eager attention saves several tensors of shape (samples, heads, length, length) for backward. The fused kernels
(https://arxiv.org/abs/2205.14135) save no such tensor.

Numerics: the same mathematics, rounded in another order. The fused kernel draws its own mask for attention dropout,
which differs from the eager mask. Does NOT cover models of other libraries, and attention weights as a result
(``output_attentions``). On the CPU, torch has no fused kernel with attention dropout. Torch does not warn about this,
but the trace shows that no memory is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

_FIELD = "_attn_implementation_internal"  # field of every config; setting the public name would change sub-configs too


class Attention(Technique):
    """`Technique`: replace eager attention with ``sdpa``."""

    name = "attention"
    numerics = "reordered"
    summary = "attention without writing its scores to memory"
    modifies = frozenset({"model"})
    reaches = frozenset({"activations", "temporaries"})
    works_on_shards = True
    is_for_trainers = True
    may_be_faster = True
    keeps_state_between_passes = False
    by_hand = 'load the model with attn_implementation="sdpa"'
    remedies: ClassVar = {"attention_scores": 0}
    stage = "parts"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return one choice, ``sdpa``, if the model uses eager attention."""
        reason = _why_not(workload.model)
        return reason if reason is not None else (Choice(technique=self.name, options={"backend": "sdpa"}),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the chosen attention is not ``sdpa``, or the model cannot use ``sdpa``."""
        if choice.options["backend"] != "sdpa":
            return f"there is no attention backend `{choice.options['backend']}`: give sdpa"
        return _why_not(workload.model)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Switch the attention in the configs, which the attention layers read in every call."""
        before = [(config, vars(config).get(_FIELD)) for config in _configs(workload.model)]
        try:
            for part in _eager_parts(workload.model):
                part.set_attn_implementation(choice.options["backend"])
            yield
        finally:
            for config, implementation in before:
                vars(config)[_FIELD] = implementation


def _why_not(model: nn.Module) -> str | None:
    name = type(model).__name__
    parts = _hugging_face_parts(model)
    if not parts:
        return f"{name} is not a model of transformers, so its attention cannot be switched"
    eager = _eager_parts(model)
    if not eager:
        return f"{name} does not use eager attention, but {parts[0].config._attn_implementation}"
    for part in [module for outer in eager for module in outer.modules() if _is_hugging_face(module)]:
        if not (part._supports_sdpa and part._can_set_attn_implementation()):
            return f"{type(part).__name__} supports eager attention only"
        if part.config.output_attentions:
            return f"{type(part).__name__} returns attention weights (output_attentions), which needs eager attention"
    return None


def _is_hugging_face(module: Any) -> bool:
    """Return whether a module is a transformers model, without importing transformers."""
    return hasattr(module, "set_attn_implementation") and hasattr(module, "config")


def _hugging_face_parts(model: nn.Module) -> list[Any]:
    """Return the outermost transformers models among the modules of a model."""
    if _is_hugging_face(model):
        return [model]
    return [part for child in model.children() for part in _hugging_face_parts(child)]


def _eager_parts(model: nn.Module) -> list[Any]:
    return [part for part in _hugging_face_parts(model) if part.config._attn_implementation == "eager"]


def _configs(model: nn.Module) -> list[Any]:
    """Return every config in which `Attention` may change the attention.

    They are the configs of all submodules, and the sub-configs of these configs.
    """
    found: dict[int, Any] = {}
    left: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while left:
        config = left.pop()
        if id(config) not in found and hasattr(config, _FIELD):
            found[id(config)] = config
            left += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(found.values())
