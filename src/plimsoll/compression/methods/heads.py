"""Fewer attention heads: each block keeps its own most important heads, and all blocks keep the same number.

Some configurations have a field for the width of a head (Llama, Qwen, Mistral, Gemma, Phi-3). They can express the
remaining number of heads, and plain ``from_pretrained`` loads the folder. If the width follows from the number of heads
(BERT, GPT-2, GPT-NeoX, OPT), the configuration cannot express it. The change is then recorded in an additional field of
the configuration (`plimsoll.weights.structure`). Query heads that share keys and values are removed together.

Not handled: encoder-decoders, and models in which more than attention depends on the number of heads (ALiBi).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.compression.attention import Attention, attentions_of, group_scores, head_width_of
from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.changed_config import Cut, become, checked, input_dim, other_numbers, twin_and_cuts, twin_of
from plimsoll.compression.importance import best, is_meta
from plimsoll.compression.shares import importance_of, num_removed, removal_fault, share_of
from plimsoll.records.plan import Choice
from plimsoll.weights.structure import keep, note, sizes_of

Kept = Mapping[tuple[str, bool], Tensor]
"""The indices to keep in linear layers. A key is the name of a layer, and ``True`` for its inputs or ``False`` for its
outputs."""


class Heads(Shrinker):
    """Removal of attention heads."""

    name = "heads"
    saves = (
        "the weights, gradients and optimizer states of attention, its activations, its key-value cache and its "
        "time, in proportion; feed-forward layers and embeddings are unchanged"
    )
    tried = ({"share": 0.25}, {"share": 0.5})

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why heads cannot be removed, for example because the share is too small for one; else ``None``."""
        found = attentions_of(bundle.model)
        if isinstance(found, str):
            return found
        groups = "heads" if found[0].heads_per_group == 1 else "groups of heads that share keys and values"
        fault = removal_fault(groups, found[0].num_groups, share_of(choice))
        if fault is not None:
            return fault
        num_kept = _num_kept(found[0], choice)
        return None if _plain(bundle.model, found, num_kept) else _outside(bundle.model, found, num_kept)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Keep the most important heads of each block."""
        model: Any = bundle.model
        attentions = checked(attentions_of(model))
        num_kept = _num_kept(attentions[0], choice)
        kept = kept_groups(model, attentions, num_kept, importance_of(choice), calibration)
        plain = _plain(model, attentions, num_kept)
        if plain is not None:
            fields, twin, cuts = plain
            become(model, twin, fields, {cut: kept[side_of(model, cut)] for cut in cuts})
            return
        checked(_outside(model, attentions, num_kept) or ())
        attributes = _attributes(model, attentions, num_kept)
        for (name, is_input), rows in kept.items():
            module = model.get_submodule(name)
            keep(module, **{"inputs" if is_input else "outputs": rows})
            note(model, "resized", name, sizes_of(module))
        for name, numbers in attributes.items():
            for attribute, value in numbers.items():
                setattr(model.get_submodule(name), attribute, value)
            note(model, "attributes", name, numbers)


def kept_groups(
    model: nn.Module, attentions: list[Attention], num_kept: int, importance: str, calibration: Calibration
) -> Kept:
    """Return the indices of the outputs or inputs that each linear layer of attention keeps.

    They belong to the ``num_kept`` most important groups of heads of each block.
    """
    scores: list[Tensor | None] = [None] * len(attentions)
    if not is_meta(model):
        scores = [*group_scores(model, attentions, importance, calibration)]
    kept: dict[tuple[str, bool], Tensor] = {}
    for attention, score in zip(attentions, scores, strict=True):
        groups = best(score, num_kept)
        kept |= {(name, False): attention.rows(role, groups) for role, name in attention.writers.items()}
        kept[attention.reader, True] = attention.rows("reader", groups)
    return kept


def _num_kept(attention: Attention, choice: Choice) -> int:
    return attention.num_groups - num_removed(attention.num_groups, share_of(choice))


def _plain(
    model: nn.Module, attentions: list[Attention], num_kept: int
) -> tuple[Mapping[str, Any], nn.Module, tuple[Cut, ...]] | None:
    """Return the changed fields of the configuration, the twin and the cuts for ``num_kept`` groups of heads.

    The twin is the model with the changed configuration; see `plimsoll.compression.changed_config`.
    Return ``None`` if the configuration cannot express this number of groups.
    """
    config: Any = model.config
    if getattr(config, "shrunk", None) and any(one.parent in config.shrunk.get("attributes", ()) for one in attentions):
        return None  # the configuration could not express an earlier removal either
    fields = {"num_attention_heads": num_kept * attentions[0].heads_per_group, "head_dim": head_width_of(config)}
    if getattr(config, "num_key_value_heads", None) is not None:
        fields["num_key_value_heads"] = num_kept
    planned = twin_and_cuts(model, fields)
    if isinstance(planned, str):
        return None
    twin, cuts = planned
    everything = torch.arange(num_kept)
    wanted = {
        (name, False): len(one.rows(role, everything)) for one in attentions for role, name in one.writers.items()
    }
    wanted |= {(one.reader, True): len(one.rows("reader", everything)) for one in attentions}
    # Only the number of rows to keep is compared with the twin: the kept rows of a joined layer are not contiguous.
    found = {side_of(model, cut): cut.num_kept for cut in cuts}
    return (fields, twin, cuts) if found == wanted else None


def side_of(model: nn.Module, cut: Cut) -> tuple[str, bool]:
    """Return the name of the layer that is cut, and whether its inputs are cut (otherwise its outputs)."""
    return cut.module, cut.name.endswith(".weight") and cut.dim == input_dim(model.get_submodule(cut.module))


def _narrower(model: nn.Module, attentions: list[Attention], num_kept: int) -> nn.Module | str:
    """Return a twin whose hidden size equals the width of the kept heads, or a sentence on why it cannot be built.

    Only the numeric attributes of its attention modules are used.
    """
    num_heads = num_kept * attentions[0].heads_per_group
    fields = {"num_attention_heads": num_heads, "hidden_size": num_heads * attentions[0].head_width}
    return twin_of(model, fields | ({"shrunk": {}} if getattr(model.config, "shrunk", None) else {}))


def _outside(model: nn.Module, attentions: list[Attention], num_kept: int) -> str | None:
    """Return why the configuration cannot record the removal of heads; ``None`` if it can.

    It cannot, for example, if modules other than attention depend on the number of heads.
    """
    if attentions[0].heads_per_group > 1:
        return (
            f"{type(model).__name__} cannot have fewer groups of {attentions[0].heads_per_group} heads, since its "
            "configuration has no head_dim: leave this out"
        )
    if "shared" in (getattr(model.config, "shrunk", None) or {}):
        return f"{len(attentions)} layers of {type(model).__name__} share their weights: use heads before shared_layers"
    twin = _narrower(model, attentions, num_kept)
    if isinstance(twin, str):
        return twin
    parents = {one.parent for one in attentions}
    for name, attribute, value in _numbers(model, twin):
        if name not in parents and "head" in attribute:
            return (
                f"in {type(model).__name__}, more than attention depends on the number of heads: {attribute} of "
                f"`{name}` would become {value}; leave this out"
            )
    return None


def _attributes(model: nn.Module, attentions: list[Attention], num_kept: int) -> dict[str, dict[str, Any]]:
    """Return the numeric attributes that each attention module must have after the removal, by module name."""
    twin = checked(_narrower(model, attentions, num_kept))
    numbers: dict[str, dict[str, Any]] = {one.parent: {} for one in attentions}
    for name, attribute, value in _numbers(model, twin):
        if name in numbers:
            numbers[name][attribute] = value
    return numbers


def _numbers(model: nn.Module, twin: nn.Module) -> list[tuple[str, str, Any]]:
    return [one for one in other_numbers(model, twin) if not isinstance(one[2], bool)]
