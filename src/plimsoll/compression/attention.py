"""The linear layers of the attention of each block: query, key and value layers, and the output projection.

Query, key and value layers are found by the last part of their names: architectures use only the few in `_ROLES`. The
output projection, which reads the heads, is the only other linear layer next to them. If one layer computes queries,
keys and values, its outputs have one of two orders: all queries, all keys, then all values (``c_attn``, ``qkv_proj``),
or query, key and value of the first head, then of the next head (``query_key_value``). Sizes are checked against the
configuration, so an unknown layout is refused, not guessed.

Not handled: attention whose weights are not linear layers, and encoder-decoders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.compression.base import Calibration
from plimsoll.compression.changed_config import block_of, input_dim
from plimsoll.compression.importance import Rows, norms, read_scores

_ROLES: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "q_proj", "q_lin", "query_proj", "q"),
    "key": ("key", "k_proj", "k_lin", "key_proj", "k"),
    "value": ("value", "v_proj", "v_lin", "value_proj", "v"),
    "joined": ("c_attn", "qkv_proj", "Wqkv"),
    "by head": ("query_key_value",),
}


@dataclass(frozen=True)
class Attention:
    """The attention of one block.

    ``parent`` is the name of the module that holds the query, key and value layers. ``writers`` are the names of these
    layers by role (the keys of `_ROLES`), and ``reader`` is the name of the output projection. A group is removed as
    a whole: it is a head, or several query heads that share keys and values. There are ``num_groups`` groups of
    ``heads_per_group`` query heads, each with ``head_width`` features.
    """

    parent: str
    writers: Mapping[str, str]
    reader: str
    num_groups: int
    heads_per_group: int
    head_width: int

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.num_groups * self.heads_per_group

    def rows(self, role: str, groups: Tensor) -> Tensor:
        """Return the indices of the outputs that the layer with the role ``role`` computes for ``groups``.

        For the role ``reader``, return the indices of the inputs that the output projection reads from ``groups``.
        """
        heads = _spread(groups, self.heads_per_group)
        queries, keys = _spread(heads, self.head_width), _spread(groups, self.head_width)
        if role in {"query", "reader"}:
            return queries
        if role == "by head":
            return _spread(groups, 3 * self.head_width)
        if role == "joined":
            first = self.num_heads * self.head_width
            return torch.cat((queries, keys + first, keys + first + self.num_groups * self.head_width))
        return keys

    def value_rows(self) -> tuple[str, Tensor]:
        """Return the name of the layer that computes the values, and the indices of the values in its outputs.

        The indices are ordered by group.
        """
        width, num_rows = self.head_width, self.num_groups * self.head_width
        for role in ("value", "joined", "by head"):
            if role in self.writers:
                break
        if role == "by head":
            return self.writers[role], torch.arange(3 * num_rows).reshape(-1, 3, width)[:, 2].flatten()
        start = (self.num_heads + self.num_groups) * width if role == "joined" else 0
        return self.writers[role], torch.arange(start, start + num_rows)


def _spread(numbers: Tensor, width: int) -> Tensor:
    """Return the indices of the elements in the numbered groups, if each group has ``width`` consecutive elements.

    >>> _spread(torch.tensor([0, 2]), 2).tolist()
    [0, 1, 4, 5]
    """
    return (numbers[:, None] * width + torch.arange(width)).flatten()


def attentions_of(model: nn.Module) -> list[Attention] | str:
    """Return the attention of each block, in order, or a sentence with the reason why it cannot be found."""
    config = getattr(model, "config", None)
    looked_for = ", ".join(name for names in _ROLES.values() for name in names)
    if getattr(config, "is_encoder_decoder", False):
        return f"{type(model).__name__} is an encoder-decoder, whose heads are not supported: leave this out"
    linear = {name: one for name, one in model.named_modules() if input_dim(one) is not None}
    roles: dict[str, dict[str, str]] = {}
    for name in linear:
        parent, _, last = name.rpartition(".")
        role = next((role for role, names in _ROLES.items() if last in names), None)
        if role is not None:
            roles.setdefault(parent, {})[role] = name
    complete = [(parent, found) for parent, found in roles.items() if _is_complete(found)]
    if not complete or not isinstance(getattr(config, "num_attention_heads", None), int):
        return (
            f"{type(model).__name__} has no attention: looked for linear layers named {looked_for}, and for "
            "num_attention_heads in its configuration"
        )
    found = [_attention(parent, writers, linear, config) for parent, writers in complete]
    return next((one for one in found if isinstance(one, str)), [one for one in found if not isinstance(one, str)])


def _is_complete(found: Mapping[str, str]) -> bool:
    return {"query", "key", "value"} <= found.keys() or "joined" in found or "by head" in found


def _attention(
    parent: str, writers: Mapping[str, str], linear: Mapping[str, nn.Module], config: Any
) -> Attention | str:
    others = _nearest_others(parent, set(writers.values()), list(linear))
    if len(others) != 1:
        return (
            f"`{parent}` has {len(others)} linear layers next to {', '.join(writers.values())}, but exactly one is "
            "expected, which reads the heads: leave this out"
        )
    width = head_width_of(config)
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads_per_group = config.num_attention_heads // groups
    num_read = _width(linear[others[0]], input_dim(linear[others[0]]))
    made = Attention(parent, writers, others[0], num_read // (width * heads_per_group), heads_per_group, width)
    everything = torch.arange(made.num_groups)
    for role, name in [*writers.items(), ("reader", others[0])]:
        inward = input_dim(linear[name])
        assert inward is not None
        wanted, num_rows = (
            len(made.rows(role, everything)),
            _width(linear[name], inward if role == "reader" else 1 - inward),
        )
        if wanted != num_rows:
            return (
                f"`{name}` has {num_rows} features, but {made.num_heads} heads of {width} in {made.num_groups} "
                f"groups need {wanted}: its layout is unknown, leave this out"
            )
    return made


def _nearest_others(parent: str, known: set[str], linear: Sequence[str]) -> list[str]:
    """Return the names of the linear layers that are in the module ``parent``, but not in ``known``.

    If there are no such layers, search the modules around ``parent`` from the inside out, but not the whole block.
    """
    block = block_of(parent)
    while len(parent) > len(block):
        others = [name for name in linear if name.startswith(f"{parent}.") and name not in known]
        if others:
            return others
        parent = parent.rpartition(".")[0]
    return []


def head_width_of(config: Any) -> int:
    """Return the number of features of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _width(module: Any, dim: int | None) -> int:
    return int(module.weight.shape[dim])


def group_scores(
    model: nn.Module, attentions: Sequence[Attention], importance: str, calibration: Calibration
) -> list[Tensor]:
    """Return for each attention the importance of each group, (groups,).

    Importance is measured on the weights that read the group's outputs. For ``magnitude``, it is multiplied by the norm
    of the weights that write the group's values.
    """
    readers = [model.get_submodule(one.reader) for one in attentions]
    widths = [one.heads_per_group * one.head_width for one in attentions]
    rows = [Rows(one, int(input_dim(one) or 0), width) for one, width in zip(readers, widths, strict=True)]
    scores = read_scores(model, importance, rows, calibration)
    if importance != "magnitude":
        return scores
    return [score * _written(model, one) for score, one in zip(scores, attentions, strict=True)]


def _written(model: nn.Module, attention: Attention) -> Tensor:
    name, rows = attention.value_rows()
    module: Any = model.get_submodule(name)
    outward = 1 - int(input_dim(module) or 0)
    squares = norms(module.weight, outward).square()
    if module.bias is not None:
        squares = squares + norms(module.bias, 0).square()
    return squares[rows].reshape(attention.num_groups, -1).sum(1).sqrt()
