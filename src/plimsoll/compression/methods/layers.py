"""Fewer layers: whole blocks are removed.

``importance=even`` (the default) keeps layers at equal distances. Other measures keep the layers with the highest
importance. ``magnitude`` is the norm of a layer's weights. ``taylor`` is the sum of the scores of all rows of its
weights (`plimsoll.compression.importance.first_order`). ``activation`` is one minus the cosine between a layer's input
and output (ShortGPT, Men et al. 2024, arXiv:2403.03853).

Not handled: layers that share their weights (ALBERT), encoder-decoders, and layers whose computation depends on their
position among the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.compression.base import Bundle, Calibration, Options, Shrinker
from plimsoll.compression.changed_config import checked, is_place, other_numbers, take_fields, take_numbers, twin_of
from plimsoll.compression.importance import best, first_order, is_meta, norms, passes, tokens_of
from plimsoll.compression.shares import importance_of, num_removed, removal_fault, share_of
from plimsoll.records.plan import Choice
from plimsoll.weights.structure import FIELD, LISTS, refresh_ties


class Layers(Shrinker):
    """Removal of layers."""

    name = "layers"
    saves = (
        "the file, the memory of weights, gradients, optimizer states and activations, and inference time, by the "
        "share of removed layers; embeddings are unchanged"
    )
    easiest = 0

    def worth_trying(self, bundle: Bundle) -> tuple[Options, ...] | str:
        """Return options that keep three quarters and half of the layers."""
        found = _lists(bundle.model)
        if isinstance(found, str):
            return found
        num_layers = len(found[0][1])
        numbers = {-(-3 * num_layers // 4), -(-num_layers // 2)} - {num_layers}
        return tuple({"keep": number} for number in sorted(numbers, reverse=True))

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why layers cannot be removed; ``None`` if they can."""
        found = _lists(bundle.model)
        if isinstance(found, str):
            return found
        num_layers, keep, fault = len(found[0][1]), choice.options.get("keep"), None
        if keep is None:
            fault = removal_fault("layers", num_layers, share_of(choice))
        elif not int(keep) < num_layers:
            fault = f"layers cannot keep {keep} of {num_layers}: give keep from 1 to {num_layers - 1}"
        return fault or _other_places(bundle.model, _kept_evenly(num_layers, _num_kept(choice, num_layers)))

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Keep the most important layers, or evenly spaced ones with ``importance=even``."""
        model = bundle.model
        lists = checked(_lists(model))
        importance, num_layers = importance_of(choice), len(lists[0][1])
        num_kept = _num_kept(choice, num_layers)
        if importance == "even" or is_meta(model):
            kept = _kept_evenly(num_layers, num_kept)
        else:
            blocks = [[layers[place] for _, layers in lists] for place in range(num_layers)]
            kept = best(_scores(model, blocks, importance, calibration), num_kept).tolist()
        twin = checked(twin_of(model, _with_notes(model.config, kept, lists)))
        checked(_other_places(model, kept) or ())
        for name, layers in lists:
            shorter = nn.ModuleList(layers[place] for place in kept).train(layers.training)
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, shorter)
        take_numbers(model, twin)
        take_fields(model, _fields(model.config, kept, num_layers))
        for name, _ in lists:
            renumber(model, name, kept)


def _num_kept(choice: Choice, num_layers: int) -> int:
    keep = choice.options.get("keep")
    return int(keep) if keep is not None else num_layers - num_removed(num_layers, share_of(choice))


def _kept_evenly(num_layers: int, num_kept: int) -> list[int]:
    """Return the indices of the first and last layer, and of layers at nearly equal distances between them.

    DistilBERT selects layers in this way (Sanh et al. 2019, arXiv:1910.01108). It needs no data. Neither does
    ``magnitude``, but the norm of a layer's weights is a poor measure of importance.

    >>> _kept_evenly(12, 6), _kept_evenly(6, 2), _kept_evenly(4, 1)
    ([0, 2, 4, 7, 9, 11], [0, 5], [0])
    """
    if num_kept == 1:
        return [0]
    return [int(place * (num_layers - 1) / (num_kept - 1) + 0.5) for place in range(num_kept)]


def _lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]] | str:
    """Return the names and module lists of the layers, all of the same length, or a sentence if no list is found.

    A list is included if it is shorter in a model whose configuration has fewer layers.
    """
    config = getattr(model, "config", None)
    number = None if hasattr(config, "model_dump") else getattr(config, "num_hidden_layers", None)
    if not isinstance(number, int) or getattr(config, "is_encoder_decoder", False):
        return (
            f"{type(model).__name__} has no single stack of layers: looked for module lists of the length "
            "num_hidden_layers in its configuration"
        )
    if number < 2:
        return f"{type(model).__name__} has {number} layer, which cannot be removed: leave this out"
    twin = twin_of(model, _fields(config, list(range(number - 1)), number))
    if isinstance(twin, str):
        return twin
    shorter = {name: len(module) for name, module in twin.named_modules() if isinstance(module, nn.ModuleList)}
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and shorter.get(name, len(module)) == len(module) - 1 == number - 1
    ]
    if not lists:
        return (
            f"no module list in {type(model).__name__} has the {number} layers of its configuration: they may share "
            "their weights, and removing layers would then save nothing"
        )
    return lists


def _fields(config: Any, kept: list[int], num_layers: int) -> Mapping[str, Any]:
    """Return the changed fields of the configuration if only the layers with the indices ``kept`` remain."""
    fields: dict[str, Any] = {"num_hidden_layers": len(kept)}
    for name, value in vars(config).items():
        # This field has a value for each layer, such as `layer_types`.
        if isinstance(value, list) and len(value) == num_layers and not name.startswith("_") and "token_id" not in name:
            fields[name] = [value[place] for place in kept]
    return fields


def _with_notes(config: Any, kept: list[int], lists: list[tuple[str, nn.ModuleList]]) -> Mapping[str, Any]:
    """Return the fields that `_fields` returns, and the recorded changes (``config.shrunk``) with new layer names.

    The recorded changes are included only if the configuration has some.
    """
    fields = dict(_fields(config, kept, len(lists[0][1])))
    shrunk = getattr(config, "shrunk", None)
    if shrunk:
        for name, _ in lists:
            shrunk = renumbered(shrunk, name, kept)
        fields["shrunk"] = shrunk
    return fields


def _other_places(model: nn.Module, kept: list[int]) -> str | None:
    """Return a sentence if a layer would need other weights or settings at its new position; else ``None``."""
    lists = _lists(model)
    if isinstance(lists, str):
        return lists
    twin = twin_of(model, _with_notes(model.config, kept, lists))
    if isinstance(twin, str):
        return twin
    for name, layers in lists:
        for new, old in enumerate(kept):
            theirs = twin.get_submodule(f"{name}.{new}")
            shapes = {key: value.shape for key, value in theirs.named_parameters()}
            if shapes != {key: value.shape for key, value in layers[old].named_parameters()}:
                return f"layer {old} of `{name}` has other weights than layer {new} should: keep all layers"
            moved = [one for _, one, _ in other_numbers(layers[old], theirs) if not is_place(one)]
            if moved:
                return f"layer {old} of `{name}` has another {moved[0]} than layer {new} should: keep all layers"
    return None


def _scores(model: nn.Module, blocks: list[list[nn.Module]], importance: str, calibration: Calibration) -> Tensor:
    if importance == "activation":
        return _changes(model, [block[0] for block in blocks], calibration)
    weights = [[one for part in block for one in part.parameters() if one.dim() > 1] for block in blocks]
    if importance == "magnitude":
        return torch.stack([torch.stack([norms(one, 0).square().sum() for one in block]).sum() for block in weights])
    flat = [(one, 0, 1) for block in weights for one in block]
    changes = iter(first_order(model, flat, calibration))
    return torch.stack([torch.stack([next(changes).sum() for _ in block]).sum() for block in weights])


def _changes(model: nn.Module, blocks: list[nn.Module], calibration: Calibration) -> Tensor:
    """Return how much each block changes its input: one minus the cosine between input and output, (blocks,).

    It is the mean over all tokens except padding.
    """
    changes = torch.zeros(len(blocks), dtype=torch.float64)
    counts = [0] * len(blocks)

    def look(place: int, mask: Tensor | None, before: Tensor, after: Any) -> None:
        after = after if isinstance(after, Tensor) else after[0]
        cosines = functional.cosine_similarity(tokens_of(before, mask), tokens_of(after, mask), dim=-1)
        changes[place] += (1 - cosines.double()).sum()
        counts[place] += len(cosines)

    passes(model, blocks, calibration, look)
    return changes / torch.tensor(counts).clamp(min=1)


def renumber(model: Any, layers: str, kept: list[int]) -> None:
    """Update the layer names in the recorded changes of a model (``config.shrunk``) after some layers were removed.

    Args:
        model: the model whose configuration is changed.
        layers: the name of the module list of the layers.
        kept: the previous indices of the remaining layers.
    """
    before = getattr(model.config, FIELD, None)
    if before:
        model.config.shrunk = renumbered(before, layers, kept)
        refresh_ties(model)


def renumbered(shrunk: Mapping[str, Any], layers: str, kept: list[int]) -> dict[str, Any]:
    """Return recorded changes (``config.shrunk``) with updated layer names; see `renumber`."""
    renamed = functools.partial(_renamed, layers=layers, kept=kept)
    return {kind: _renamed_changes(kind, changes, renamed) for kind, changes in shrunk.items()}


def _renamed(name: str, layers: str, kept: list[int]) -> str | None:
    if not name.startswith(f"{layers}."):
        return name
    number, dot, rest = name[len(layers) + 1 :].partition(".")
    return f"{layers}.{kept.index(int(number))}{dot}{rest}" if int(number) in kept else None


def _renamed_changes(kind: str, changes: Any, renamed: Callable[[str], str | None]) -> Any:
    if kind in LISTS:
        return [name for name in map(renamed, changes) if name is not None]
    if kind != "shared":
        return {name: value for old, value in changes.items() if (name := renamed(old)) is not None}
    after: dict[str, str] = {}
    # If the layer that owned shared parameters was removed, the first remaining layer of its group owns them.
    heirs: dict[str, str] = {}
    for old, source in changes.items():
        name = renamed(old)
        if name is not None:
            first = renamed(source) or heirs.setdefault(source, name)
            after |= {} if first == name else {name: first}
    return after
