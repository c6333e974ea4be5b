"""Low-rank adapters trained on a frozen model: frozen weights need no gradients and no optimizer states.

peft adds low-rank adapters (Hu et al. 2021, arXiv:2106.09685) to each linear layer of the repeated blocks. The new head
of a classifier is trained in full. With ``base=int8`` or ``nf4``, the weights of adapted layers are stored as codes of
8 or 4 bits (`mechanisms.frozen_base`), as in QLoRA (arXiv:2305.14314).

While it is installed, ``save_pretrained`` writes the adapters in peft's format. On exit the original model is restored,
and the adapters are discarded. Does NOT cover models of libraries other than transformers, and parameter groups with
different options: all trained parameters are in the first group.
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
"""The default rank of peft, and twice the rank as ``lora_alpha``, as in peft's examples."""

_BASES = ("kept", *CODECS)


class Lora(Technique):
    """`Technique`: train low-rank adapters on a frozen model."""

    name = "lora"
    numerics = "lossy"
    summary = "small adapters are trained, and the model is frozen"
    modifies = frozenset({"model", "optimizer"})
    reaches = frozenset({"parameters", "gradients", "optimizer states"})
    is_for_the_run = True
    keeps_state_between_passes = False
    by_hand = "wrap the model with peft.get_peft_model"
    remedies: ClassVar = {"optimizer_states": 3}
    stage = "model"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return choices of one adapter size, with the model unchanged or in 8-bit or 4-bit codes.

        Other sizes can be pinned.
        """
        options: list[dict[str, Value]] = [{"rank": _RANK, "alpha": _ALPHA, "base": base} for base in _BASES]
        return _impossible(workload.model) or tuple(Choice(technique=self.name, options=one) for one in options)

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the job does not allow this technique, or peft, the model or an option excludes it."""
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
            stack.callback(kept.bring_back)  # runs last, after the codes have been freed
            stack.enter_context(_adapted(model, choice))
            base = str(choice.options.get("base", "kept"))
            if base in CODECS:
                to_codes([model.get_submodule(name) for name in names], model, kept, base)
            stack.enter_context(_only_trainable(model, workload.optimizer))
            yield

    def builds_outside(self, choice: Choice, device: Literal["cpu", "cuda"]) -> bool:
        """Return whether the frozen model is stored as codes, which are computed from memory-mapped model files."""
        return device == "cpu" and choice.options.get("base") in CODECS


def adapted_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers inside a ``ModuleList``, that is, in repeated blocks of a model."""
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
        return f"a {type(model).__name__} is not a model of transformers, and peft adapts only these"
    return None if adapted_layers(model) else f"a {type(model).__name__} has no blocks with linear layers"


def _head_of(model: nn.Module) -> list[str]:
    """Return the names of a classifier's modules outside the pretrained model. They have no pretrained weights."""
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
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # expected for Conv1D of transformers
        model.add_adapter(config)


@contextmanager
def _only_trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give an optimizer only the trainable parameters of a model, in its first group.

    The optimizer stays the same object, because a schedule refers to it.
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
