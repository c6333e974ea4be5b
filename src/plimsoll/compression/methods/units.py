"""Fewer hidden units in the layers of an LSTM, a GRU or a plain RNN: each direction keeps its most important ones.

A unit is a row of each gate, a column of the recurrent weights, and a column of the weights that read the layer: the
next layer or the output layer. All layers keep the same number of units, since the configuration has only one hidden
size. Importance is measured on the weights that read a unit, including the recurrent weights. For ``magnitude``, it is
multiplied by the norm of the weights that write the unit.

Not handled: an adaptive softmax, since the feature sizes of its rare words depend on the hidden size, and recurrent
layers in models other than Plimsoll's.

Shapes: H units, D directions, G gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.changed_config import Cut, become, checked, twin_and_cuts
from plimsoll.compression.importance import best, first_order, is_meta, norms, passes
from plimsoll.compression.shares import importance_of, num_removed, removal_fault, share_of
from plimsoll.records.plan import Choice


class Direction(NamedTuple):
    """One direction of a recurrent layer, 0 for forward or 1 for backward, with its own selection of hidden units."""

    layer: int
    direction: int


class Reading(NamedTuple):
    """The name of a weight, and the directions whose hidden units its second dimension indexes, in this order."""

    name: str
    directions: tuple[Direction, ...]


class Units(Shrinker):
    """Removal of hidden units from recurrent layers."""

    name = "units"
    saves = (
        "the recurrent weights, their gradients and optimizer states with the square of the remaining share; "
        "activations, and weights that read these layers, in proportion; inference time with both; the embedding "
        "only if the output layer shares its weights"
    )
    tried = ({"share": 0.125}, {"share": 0.25}, {"share": 0.5})

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why units cannot be removed; ``None`` if they can."""
        found = _planned(bundle.model, share_of(choice))
        return found if isinstance(found, str) else None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Keep the most important hidden units of each recurrent layer.

        The units are selected for each direction (forward, backward) separately.
        """
        model: Any = bundle.model
        fields, twin, cuts = checked(_planned(model, share_of(choice)))
        layers, before = model.recurrent, model.config.hidden_size
        num_kept = fields["hidden_size"]
        scores: Mapping[Direction, Tensor | None] = dict.fromkeys(_directions(layers))
        if not is_meta(model):
            scores = _scores(model, importance_of(choice), calibration)
        units = {direction: best(score, num_kept) for direction, score in scores.items()}
        directions_of = _directions_by_cut(model)
        kept: dict[Cut, Tensor] = {}
        for cut in cuts:
            directions = directions_of[cut.name, cut.dim]
            starts = range(0, cut.num_rows, before)  # a start per gate of one direction, or per direction
            sides = directions if len(directions) > 1 else directions * len(starts)
            kept[cut] = torch.cat([units[direction] + start for direction, start in zip(sides, starts, strict=True)])
        become(model, twin, fields, kept)


def _planned(model: nn.Module, share: float) -> tuple[Mapping[str, Any], nn.Module, tuple[Cut, ...]] | str:
    """Return the changed fields of the configuration, the twin, and the cuts.

    The twin is the model with the changed configuration; see `plimsoll.compression.changed_config`.
    If units cannot be removed, return a sentence with the reason.
    """
    config: Any = getattr(model, "config", None)
    layers = getattr(model, "recurrent", None)
    if not isinstance(layers, nn.RNNBase) or not hasattr(config, "model_dump"):
        return (
            f"{type(model).__name__} has no recurrent layers: looked for an LSTM, GRU or RNN named `recurrent`, as in "
            "Plimsoll's recurrent models"
        )
    if getattr(config, "adaptive_cutoffs", None):
        return (
            f"in an adaptive softmax with cutoffs {list(config.adaptive_cutoffs)}, the feature sizes of rare words "
            "depend on the hidden size: train a model without adaptive_cutoffs to remove units"
        )
    fault = removal_fault("units", config.hidden_size, share)
    if fault is not None:
        return fault
    fields: dict[str, Any] = {"hidden_size": config.hidden_size - num_removed(config.hidden_size, share)}
    if config.tie_weights:  # the embedding loses the same dimensions as the last layer
        fields["embedding_size"] = fields["hidden_size"]
    found = twin_and_cuts(model, fields)
    return found if isinstance(found, str) else (fields, *found)


def _directions(layers: Any) -> list[Direction]:
    directions = 1 + layers.bidirectional
    return [Direction(layer, direction) for layer in range(layers.num_layers) for direction in range(directions)]


def _suffix(direction: Direction) -> str:
    return f"l{direction.layer}" + ("_reverse" if direction.direction else "")


def _layer(directions: list[Direction], number: int) -> tuple[Direction, ...]:
    return tuple(direction for direction in directions if direction.layer == number)


def _readings(model: Any) -> list[Reading]:
    """Return the weights that read hidden units.

    The recurrent weights of a direction read that direction's units. The input weights of the next layer read the units
    of both directions, and the output layer reads the units of the last layer.
    """
    layers, directions = model.recurrent, _directions(model.recurrent)
    found = [Reading(f"recurrent.weight_hh_{_suffix(direction)}", (direction,)) for direction in directions]
    found += [
        Reading(f"recurrent.weight_ih_{_suffix(direction)}", _layer(directions, direction.layer - 1))
        for direction in directions
        if direction.layer
    ]
    found.append(Reading("head.weight", _layer(directions, layers.num_layers - 1)))
    if model.config.tie_weights:  # the embedding's dimensions are the last layer's units
        found.append(Reading("recurrent.weight_ih_l0", _layer(directions, layers.num_layers - 1)))
    return found


def _directions_by_cut(model: Any) -> dict[tuple[str, int], tuple[Direction, ...]]:
    """Map each weight and dimension to the recurrent layers and directions whose hidden units index that dimension."""
    found = {(one.name, 1): one.directions for one in _readings(model)}
    for direction in _directions(model.recurrent):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            found[f"recurrent.{kind}_{_suffix(direction)}", 0] = (direction,)
    if model.config.tie_weights:
        found["embedding.weight", 1] = found["head.weight", 1]
    return found


def _scores(model: Any, importance: str, calibration: Calibration) -> dict[Direction, Tensor]:
    """Return the importance of each unit of each direction, (H,)."""
    width, readings = model.config.hidden_size, _readings(model)
    if model.config.tie_weights:
        readings.pop()  # this weight reads the embedding, whose tied weight is scored as the output layer's
    scores = {direction: torch.zeros(width, dtype=torch.float64) for direction in _directions(model.recurrent)}
    weights = [model.get_parameter(one.name) for one in readings]
    if importance == "taylor":
        sizes = first_order(model, [(weight, 1, 1) for weight in weights], calibration)
    else:
        sizes = [norms(weight, 1).square() for weight in weights]
    for reading, size in zip(readings, sizes, strict=True):
        for direction, part in zip(reading.directions, size.reshape(-1, width), strict=True):
            scores[direction] += part
    if importance == "taylor":
        return scores
    flows = _activity(model, calibration) if importance == "activation" else _written(model)
    return {direction: flows[direction] * score.sqrt() for direction, score in scores.items()}


def _written(model: Any) -> dict[Direction, Tensor]:
    """Return for each direction the norm of the weights and biases that write each unit, over all gates, (H,)."""
    width, written = model.config.hidden_size, {}
    for direction in _directions(model.recurrent):
        names = [f"recurrent.{kind}_{_suffix(direction)}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        squares = [norms(model.get_parameter(name), 0).square().reshape(-1, width).sum(0) for name in names]
        written[direction] = torch.stack(squares).sum(0).sqrt()
    return written


def _activity(model: Any, calibration: Calibration) -> dict[Direction, Tensor]:
    """Return for each direction the mean absolute output of each unit in a batch, summed over batches, (H,).

    Padding does not count if sequences are packed.
    """
    width = model.config.hidden_size
    sums = {direction: torch.zeros(width, dtype=torch.float64) for direction in _directions(model.recurrent)}
    alone = [_single(model.recurrent, number) for number in range(model.recurrent.num_layers)]

    def look(_: int, mask: Tensor | None, given: Any, __: Any) -> None:
        for number, layer in enumerate(alone):
            given, _state = layer(given)
            outputs = given.data if isinstance(given, PackedSequence) else given.flatten(0, -2)
            total = outputs.detach().double().abs().mean(0)
            for direction, part in zip(_layer(list(sums), number), total.reshape(-1, width), strict=True):
                sums[direction] += part

    passes(model, [model.recurrent], calibration, look)
    return sums


def _single(layers: Any, number: int) -> nn.Module:
    """Return the layer with index ``number`` of a recurrent module, as a module that shares its weights."""
    inward = layers.input_size if number == 0 else layers.hidden_size * (1 + layers.bidirectional)
    options = {"bias": layers.bias, "batch_first": layers.batch_first, "bidirectional": layers.bidirectional}
    with torch.device("meta"):
        single: nn.Module = type(layers)(inward, layers.hidden_size, **options)
    for name, weight in layers.named_parameters():
        kind, _, place = name.rpartition("_l")
        if place.partition("_")[0] == str(number):
            setattr(single, f"{kind}_l0{place[len(str(number)) :]}", weight)
    return single.eval()
