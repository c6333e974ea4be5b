"""A smaller hidden size: the same dimensions are removed wherever a token's vector is read or written.

If the configuration has a field for the width of a head (Llama, Qwen, Gemma), attention keeps its heads. If this width
is the hidden size divided by the number of heads (BERT, GPT-2, GPT-NeoX, OPT), whole heads are removed too. Each block
then keeps its most important heads, and the share to remove must correspond to whole heads. A normalization over fewer
dimensions differs, so the outputs always change, even if the removed dimensions were zero.

Not handled: encoder-decoders, and models whose structure was changed before (`plimsoll.weights.structure`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.compression.attention import Attention, attentions_of, head_width_of
from plimsoll.compression.base import Bundle, Calibration, Options, Shrinker
from plimsoll.compression.changed_config import Cut, become, checked, cuts_of, input_dim, twin_and_cuts, twin_of
from plimsoll.compression.importance import Rows, best, first_order, is_meta, norms, read_scores
from plimsoll.compression.methods.channels import widths_of
from plimsoll.compression.methods.heads import Kept, kept_groups, side_of
from plimsoll.compression.shares import importance_of, num_removed, removal_fault, share_of
from plimsoll.records.plan import Choice

_EQUALS = ("embedding_size", "word_embed_proj_dim", "pooler_hidden_size")
"""Configuration fields with other widths. If such a width equals the hidden size, the model has no projection between
the two. The field is then set to the new hidden size, too."""


@dataclass(frozen=True)
class Narrowing:
    """The changes for a smaller hidden size: changed fields of the configuration, the twin, and two kinds of cuts.

    The twin is the model with the changed configuration; see `plimsoll.compression.changed_config`.
    ``inner`` cuts remove whole heads, so that ``num_groups`` groups remain in each block. They are empty if attention
    keeps its heads. ``residual`` cuts remove dimensions of the vectors between the layers.
    """

    fields: Mapping[str, Any]
    twin: nn.Module
    attentions: list[Attention]
    num_groups: int
    inner: tuple[Cut, ...]
    residual: tuple[Cut, ...]


class Hidden(Shrinker):
    """Removal of dimensions from the vectors between the layers."""

    name = "hidden"
    saves = (
        "everything in proportion, including embeddings: the file, the memory of weights, gradients, optimizer "
        "states and activations, and inference time"
    )

    def worth_trying(self, bundle: Bundle) -> tuple[Options, ...]:
        """Return options that remove about an eighth, a quarter and a half of the dimensions.

        If heads are removed too, these shares are rounded to whole heads. The importance measure is ``activation``,
        with which the loss rose far less than with ``magnitude`` (docs/LOG.md).
        """
        shares = [0.125, 0.25, 0.5]
        found = attentions_of(bundle.model)
        if not isinstance(found, str) and not _has_head_width(bundle.model):
            whole = found[0].num_groups
            shares = sorted({round(max(1, num_removed(whole, share)) / whole, 4) for share in shares})
        return tuple({"share": share, "importance": "activation"} for share in shares)

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why dimensions cannot be removed, or ``None``. One reason is a share that would split a head."""
        found = _narrowed(bundle.model, share_of(choice))
        return found if isinstance(found, str) else None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Keep the most important dimensions, and the most important heads if heads are removed too."""
        model, importance = bundle.model, importance_of(choice)
        found: Narrowing = checked(_narrowed(model, share_of(choice)))
        inner: Kept = {}
        if found.inner:
            inner = kept_groups(model, found.attentions, found.num_groups, importance, calibration)
        kept = {cut: inner[side_of(model, cut)] for cut in found.inner}
        score = None if is_meta(model) else _scores(model, found.residual, importance, calibration)
        dimensions = best(score, found.residual[0].num_kept)
        become(model, found.twin, found.fields, kept | dict.fromkeys(found.residual, dimensions))


def _narrowed(model: nn.Module, share: float) -> Narrowing | str:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "model_dump") or not isinstance(getattr(config, "hidden_size", None), int):
        return (
            f"{type(model).__name__} has no hidden size between blocks: looked for hidden_size in the configuration of "
            "a transformers model"
        )
    attentions = attentions_of(model)
    if isinstance(attentions, str):
        return attentions
    if getattr(config, "shrunk", None):
        return (
            f"{type(model).__name__} has {', '.join(config.shrunk)} layers, whose sizes are independent of its hidden "
            "size: use hidden before other methods"
        )
    if _has_head_width(model):
        # Some configurations (Llama) require a multiple of the number of heads, though the model does not.
        step = math.gcd(config.hidden_size, config.num_attention_heads)
        num_steps = config.hidden_size // step
        fault = removal_fault(f"blocks of {step} dimensions", num_steps, share)
        new_width = (num_steps - num_removed(num_steps, share)) * step
        return fault or _plan(model, attentions, new_width, attentions[0].num_groups)
    # Only whole heads are removed: the remaining heads keep their width, and rotary embeddings their frequencies.
    whole, width = attentions[0].num_groups, attentions[0].head_width * attentions[0].heads_per_group
    removed = num_removed(whole, share)
    if not 0 < removed < whole or abs(removed / whole - share) > 0.5 / config.hidden_size:
        possible = ", ".join(f"{number / whole:.4g}" for number in range(1, whole))
        return (
            f"a share of {share:g} of {config.hidden_size} dimensions does not leave whole heads of {width}; "
            f"{type(model).__name__} has {whole}: "
            + (f"give one of {possible}" if possible else "leave this out, since none can be removed")
        )
    return _plan(model, attentions, (whole - removed) * width, whole - removed)


def _has_head_width(model: nn.Module) -> bool:
    """Return whether the configuration can set the width of heads independently of the hidden size."""
    config: Any = model.config
    if not isinstance(getattr(config, "hidden_size", None), int):
        return False
    wider = twin_of(model, {"head_dim": 2 * head_width_of(config)})
    return isinstance(wider, nn.Module) and isinstance(cuts_of(model, wider), str)


def _plan(model: nn.Module, attentions: list[Attention], new_width: int, num_groups: int) -> Narrowing | str:
    config: Any = model.config
    fields: dict[str, Any] = {"hidden_size": new_width} | widths_of(config)
    fields |= {name: new_width for name in _EQUALS if getattr(config, name, None) == config.hidden_size}
    if num_groups == attentions[0].num_groups:
        fields["head_dim"] = attentions[0].head_width
    else:
        fields["num_attention_heads"] = num_groups * attentions[0].heads_per_group
        if getattr(config, "num_key_value_heads", None):
            fields["num_key_value_heads"] = num_groups
    found = twin_and_cuts(model, fields)
    if isinstance(found, str):
        return found
    twin, cuts = found
    heads = {(name, False) for one in attentions for name in one.writers.values()}
    heads |= {(one.reader, True) for one in attentions}
    inner = tuple(cut for cut in cuts if side_of(model, cut) in heads)
    residual = tuple(cut for cut in cuts if cut not in inner)
    odd = [cut for cut in residual if (cut.num_rows, cut.num_kept) != (config.hidden_size, new_width)]
    if odd:
        return (
            f"`{odd[0].name}` has {odd[0].num_rows} rows, which depend on the hidden size of {config.hidden_size} in "
            "an unknown way: leave this out"
        )
    return Narrowing(fields, twin, attentions, num_groups, inner, residual)


def _scores(model: nn.Module, cuts: tuple[Cut, ...], importance: str, calibration: Calibration) -> Tensor:
    """Return the importance of each dimension, (hidden size,), summed over weights. A tied weight counts once.

    ``activation`` uses the weights that read the dimension; other measures also use the weights that write it.
    """
    once = {(id(model.get_parameter(cut.name)), cut.dim): cut for cut in cuts}.values()
    if importance == "activation":
        readers = [
            Rows(module, cut.dim)
            for cut in once
            if input_dim(module := model.get_submodule(cut.module)) == cut.dim and cut.name.endswith(".weight")
        ]
        return torch.stack(read_scores(model, importance, readers, calibration)).sum(0)
    if importance == "taylor":
        weights = [(model.get_parameter(cut.name), cut.dim, 1) for cut in once]
        return torch.stack(first_order(model, weights, calibration)).sum(0)
    sizes = [norms(model.get_parameter(cut.name), cut.dim).square() for cut in once]
    # Each weight counts equally: otherwise a large embedding would outweigh all others.
    return torch.stack([one / one.sum() for one in sizes if one.sum() > 0]).sum(0)
