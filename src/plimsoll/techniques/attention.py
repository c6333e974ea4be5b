"""Attention by torch's fused kernels in place of Hugging Face's eager code, which writes all scores to memory.

A model of transformers (https://huggingface.co/docs/transformers/attention_interface) whose config says ``eager`` runs
``torch.nn.functional.scaled_dot_product_attention`` while this is installed. Eager attention keeps several tensors of
samples x heads x length x length for backward; the fused kernels (https://arxiv.org/abs/2205.14135) keep none.

Numerics: the same mathematics, rounded in another order. Dropout of attention weights draws its mask inside the kernel,
so another one than eager. Does NOT cover models of other libraries, attention weights as a result
(``output_attentions``), and the CPU with attention dropout, where torch has no fused kernel (it says nothing; the
trace shows that nothing is saved).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, Numerics
from plimsoll.records.trace import Category
from plimsoll.techniques.mechanisms.technique import Choices, Setting

_FIELD = "_attn_implementation_internal"  # where every config keeps it; setting the public name sets sub-configs too


class Attention:
    """`Technique`: exchange eager attention for ``sdpa``."""

    name: ClassVar[str] = "attention"
    numerics: ClassVar[Numerics] = "reordered"
    summary: ClassVar[str] = "attention without writing its scores to memory"
    reaches: ClassVar[frozenset[Category]] = frozenset({"activations", "temporaries"})
    is_for_the_run: ClassVar[bool] = False
    may_be_faster: ClassVar[bool] = True

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """The fused kernels, if the model uses none."""
        reason = _why_not(workload.model)
        return reason if reason is not None else (Choice(technique=self.name, options={"backend": "sdpa"}),)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Only ``sdpa`` is known, and the model must be able to use it."""
        if choice.options["backend"] != "sdpa":
            return f"there is no attention backend `{choice.options['backend']}`: give sdpa"
        return _why_not(workload.model)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Switch the configs, which attention layers read in every call."""
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
        return f"{name} is not a model of transformers: it says itself how attention is computed"
    eager = _eager_parts(model)
    if not eager:
        return f"{name} does not use eager attention, but {parts[0].config._attn_implementation}"
    for part in [module for outer in eager for module in outer.modules() if _is_hugging_face(module)]:
        if not (part._supports_sdpa and part._can_set_attn_implementation()):
            return f"{type(part).__name__} has eager attention only"
        if part.config.output_attentions:
            return (
                f"{type(part).__name__} returns attention weights (output_attentions), which only eager attention has"
            )
    return None


def _is_hugging_face(module: Any) -> bool:
    """Whether a module is a model of transformers; asks without loading it."""
    return hasattr(module, "set_attn_implementation") and hasattr(module, "config")


def _hugging_face_parts(model: nn.Module) -> list[Any]:
    """The outermost models of transformers in a model."""
    if _is_hugging_face(model):
        return [model]
    return [part for child in model.children() for part in _hugging_face_parts(child)]


def _eager_parts(model: nn.Module) -> list[Any]:
    return [part for part in _hugging_face_parts(model) if part.config._attn_implementation == "eager"]


def _configs(model: nn.Module) -> list[Any]:
    """Every config that a switch may reach: of the models inside, and what is inside those."""
    found: dict[int, Any] = {}
    left: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while left:
        config = left.pop()
        if id(config) not in found and hasattr(config, _FIELD):
            found[id(config)] = config
            left += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(found.values())
