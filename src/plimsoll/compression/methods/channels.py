"""Fewer channels in the feed-forward layers.

A channel is a row of the layer that widens a token's vector, and a column of the layer that narrows it again. These
layers are found by a change of the feed-forward width in the configuration, which changes their shapes
(`plimsoll.compression.changed_config`). Each block keeps its own most important channels. All blocks keep the same
number, since the configuration has only one width. Fused gates (two halves in one layer) lose the same channels in both
halves.

Not handled: experts, whose weights are neither Linear nor Conv1D, and architectures without a width in their
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.changed_config import Cut, become, block_of, checked, input_dim, twin_and_cuts
from plimsoll.compression.importance import Rows, best, is_meta, norms, read_scores
from plimsoll.compression.shares import importance_of, num_removed, removal_fault, share_of
from plimsoll.records.plan import Choice

_WIDTHS = (
    "intermediate_size",
    "hidden_dim",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "ffn_hidden_size",
    "n_inner",
)
"""Names of the width of feed-forward layers in configurations."""


@dataclass
class FeedForward:
    """The cuts that remove channels from one block.

    ``writers`` cut the weights and biases that compute the channels, and ``readers`` cut the weight that reads them.
    """

    writers: list[Cut] = field(default_factory=list)
    readers: list[Cut] = field(default_factory=list)

    @property
    def width(self) -> int:
        """The number of channels."""
        return self.readers[0].num_rows


class Channels(Shrinker):
    """Removal of channels from feed-forward layers."""

    name = "channels"
    saves = (
        "the file, the memory of weights, gradients and optimizer states, the activations of these layers, and "
        "inference time, in proportion; embeddings and attention are unchanged"
    )
    tried = ({"share": 0.125}, {"share": 0.25}, {"share": 0.5})

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why channels cannot be removed; ``None`` if they can."""
        found = _planned(bundle.model, share_of(choice))
        return found if isinstance(found, str) else None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Keep the most important channels of each block."""
        model = bundle.model
        fields, twin, parts = checked(_planned(model, share_of(choice)))
        scores: list[Tensor | None] = [None] * len(parts)
        if not is_meta(model):
            scores = [*_scores(model, parts, importance_of(choice), calibration)]
        kept: dict[Cut, Tensor] = {}
        for part, score in zip(parts, scores, strict=True):
            rows = best(score, part.readers[0].num_kept)
            for cut in (*part.readers, *part.writers):
                halves = torch.arange(0, cut.num_rows, part.width)
                kept[cut] = (halves[:, None] + rows).flatten()
        become(model, twin, fields, kept)


def _planned(model: nn.Module, share: float) -> tuple[Mapping[str, Any], nn.Module, list[FeedForward]] | str:
    """Return the changed fields of the configuration, the twin, and the cuts of each block.

    The twin is the model with the changed configuration; see `plimsoll.compression.changed_config`.
    If channels cannot be removed, return a sentence with the reason.
    """
    widths = widths_of(getattr(model, "config", None))
    if not widths:
        return (
            f"{type(model).__name__} has no feed-forward pair: looked for two linear layers x -> intermediate_size -> "
            f"x in each block, and for {', '.join(_WIDTHS)} in its configuration"
        )
    for width in widths.values():
        fault = removal_fault("channels", width, share)
        if fault is not None:
            return fault
    fields = {name: width - num_removed(width, share) for name, width in widths.items()}
    found = twin_and_cuts(model, fields)
    if isinstance(found, str):
        return found
    twin, cuts = found
    parts = _parts(model, cuts)
    return parts if isinstance(parts, str) else (fields, twin, parts)


def widths_of(config: Any) -> dict[str, int]:
    """Return the widths of feed-forward layers in a configuration, by field name; empty if it has no such field."""
    if config is None or hasattr(config, "model_dump"):
        return {}
    widths = {name: getattr(config, name) for name in _WIDTHS if isinstance(getattr(config, name, None), int)}
    if not widths:  # in GPT-2 and GPT-Neo, None means 4 * hidden_size
        widths = {name: 4 * config.hidden_size for name in _WIDTHS if getattr(config, name, 0) is None}
    return widths


def _parts(model: nn.Module, cuts: tuple[Cut, ...]) -> list[FeedForward] | str:
    parts: dict[str, FeedForward] = {}
    for cut in cuts:
        module, part = model.get_submodule(cut.module), parts.setdefault(block_of(cut.name), FeedForward())
        inward = input_dim(module)
        if inward is None:
            return (
                f"`{cut.name}` has channels in a {type(module).__name__}: looked for two linear layers "
                f"x -> {cut.num_rows} -> x in each block (experts are not supported)"
            )
        reads = cut.name.endswith(".weight") and cut.dim == inward
        (part.readers if reads else part.writers).append(cut)
    for name, part in parts.items():
        widths = {cut.num_rows % part.width for cut in part.writers} if len(part.readers) == 1 else {-1}
        if widths != {0}:
            return (
                f"`{name}` has {len(part.readers)} layers that read channels and {len(part.writers)} weights that "
                "write them: looked for two linear layers x -> intermediate_size -> x in each block"
            )
    if not parts:
        return f"no layer of {type(model).__name__} depends on the width in its configuration: no feed-forward pair"
    return list(parts.values())


def _scores(model: nn.Module, parts: list[FeedForward], importance: str, calibration: Calibration) -> list[Tensor]:
    readers = [Rows(model.get_submodule(cut.module), cut.dim) for part in parts for cut in part.readers]
    scores = read_scores(model, importance, readers, calibration)
    if importance == "magnitude":
        scores = [score * _written(model, part) for part, score in zip(parts, scores, strict=True)]
    return scores


def _written(model: nn.Module, part: FeedForward) -> Tensor:
    """Return for each channel the product of the norms of the weights that write it, (channels,).

    There is one norm per layer or gate, over its weights and bias.
    """
    squares: dict[str, Tensor] = {}
    for cut in part.writers:
        size = norms(model.get_parameter(cut.name), cut.dim).square().reshape(-1, part.width)
        squares[cut.module] = squares.get(cut.module, torch.zeros_like(size)) + size
    return torch.cat(list(squares.values())).sqrt().prod(0)
