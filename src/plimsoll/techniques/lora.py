"""Small adapters are trained beside the layers of a model that is frozen: no gradients and no states for the rest.

Low-rank adaptation, Hu et al. 2021 (arXiv:2106.09685), as peft does it, on each linear layer of a block. A classifier's
head, which is new, is trained as a whole. With ``base=int8`` or ``nf4`` the weights of the layers that have adapters
are codes of 8 or 4 bits meanwhile (`mechanisms.frozen_base`), as in QLoRA (arXiv:2305.14314).

While it is installed ``save_pretrained`` writes the adapters, as peft's own folder; afterwards the model is as it was
given, without what was learned. Does NOT cover models that are not of transformers, and parameter groups with options
of their own (the adapters are in the first).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from plimsoll.models.hugging_face import is_hugging_face
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, Value
from plimsoll.techniques.mechanisms.codes import CODECS
from plimsoll.techniques.mechanisms.frozen_base import KeptOutside, to_codes
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

_RANK, _ALPHA = 8, 16
"""peft's own rank, and twice as much for the scale, as its examples have it."""

_BASES = ("kept", *CODECS)


class Lora(Technique):
    """`Technique`: train low-rank adapters of a frozen model."""

    name = "lora"
    numerics = "lossy"
    summary = "small adapters are trained, the model is frozen"
    modifies = frozenset({"model", "optimizer"})
    reaches = frozenset({"parameters", "gradients", "optimizer states"})
    is_for_the_run = True
    keeps_state_between_passes = False
    by_hand = "wrap the model with peft.get_peft_model"
    remedies: ClassVar = {"optimizer_states": 3}
    stage = "model"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """One size of adapters, beside the model as it is and in codes of 8 and 4 bits; other sizes can be pinned."""
        options: list[dict[str, Value]] = [{"rank": _RANK, "alpha": _ALPHA, "base": base} for base in _BASES]
        return _impossible(workload.model) or tuple(Choice(technique=self.name, options=one) for one in options)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """What is not allowed, cannot be imported or has no layers, and sizes that are none."""
        if self.name not in setting.allow:
            return "it is lossy: allow it with `allow: [lora]`"
        for name in ("rank", "alpha"):
            value = choice.options.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                return f"{name} is {value}: give a whole number of 1 or more"
        base = choice.options.get("base", "kept")
        if base not in _BASES:
            return f"base is {base}: give one of {', '.join(_BASES)}"
        return _impossible(workload.model)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Freeze the model, add the adapters and give them to the optimizer."""
        model, kept = workload.model, KeptOutside(workload.files)
        names = adapted_layers(model)
        with ExitStack() as stack:
            stack.callback(kept.bring_back)  # last: what stood in for them is gone by then
            stack.enter_context(_adapted(model, choice))
            base = str(choice.options.get("base", "kept"))
            if base in CODECS:
                to_codes([model.get_submodule(name) for name in names], model, kept, base)
            stack.enter_context(_only_trainable(model, workload.optimizer))
            yield

    def builds_outside(self, choice: Choice, device: Literal["cpu", "cuda"]) -> bool:
        """Return whether the frozen model is in codes: they are made from its files, where the rest of it stays."""
        return device == "cpu" and choice.options.get("base") in CODECS


def adapted_layers(model: nn.Module) -> list[str]:
    """The linear layers in the repeated blocks of a model."""
    from transformers.pytorch_utils import Conv1D

    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name.startswith(blocks)
    ]


def _impossible(model: nn.Module) -> str | None:
    if find_spec("peft") is None:
        return "peft is not installed: `pip install torch-plimsoll[lora]`"
    if not is_hugging_face(model):
        return f"a {type(model).__name__} is not a model of transformers, which are the ones that peft adapts"
    return None if adapted_layers(model) else f"a {type(model).__name__} has no blocks with linear layers"


def _head_of(model: nn.Module) -> list[str]:
    """The parts of a classifier that are not the pretrained model: they have no weights to stay at."""
    if getattr(model, "problem_type", None) is None and "Classification" not in type(model).__name__:
        return []
    prefix = getattr(model, "base_model_prefix", "")
    return [name for name, part in model.named_children() if name != prefix and any(True for _ in part.parameters())]


@contextmanager
def _adapted(model: Any, choice: Choice) -> Iterator[None]:
    modules, fields = dict(model.named_modules()), dict(vars(model))
    were_trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        _add_adapters(model, choice)
        yield
    finally:
        for name, module in modules.items():
            parent, _, child = name.rpartition(".")
            if name and getattr(modules[parent], child) is not module:
                setattr(modules[parent], child, module)
        for name in set(vars(model)) - set(fields):
            delattr(model, name)
        vars(model).update(fields)
        for parameter, requires_grad in were_trained:
            parameter.requires_grad_(requires_grad)


def _add_adapters(model: Any, choice: Choice) -> None:
    from peft import LoraConfig

    config = LoraConfig(
        r=int(choice.options["rank"]),
        lora_alpha=int(choice.options["alpha"]),
        target_modules=adapted_layers(model),
        modules_to_save=_head_of(model) or None,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # it is, for transformers' Conv1D
        model.add_adapter(config)


@contextmanager
def _only_trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer have what is trained of a model, in its first group, in place of what it has.

    It stays the same object: a schedule belongs to it.
    """
    states = dict(optimizer.state)
    members = [group["params"] for group in optimizer.param_groups]
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.param_groups[0]["params"] = [one for one in model.parameters() if one.requires_grad]
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(states)
        for group, parameters in zip(optimizer.param_groups, members, strict=True):
            group["params"] = parameters
