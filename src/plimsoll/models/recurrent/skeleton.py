"""Skeletons of recurrent models (`plimsoll.models.recurrent.model`), with the checkpoint entry of each weight.

Requests for another vocabulary size, quantization or adapters raise an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from plimsoll.errors import JobError, WeightsError
from plimsoll.models.names import RECURRENT
from plimsoll.models.recurrent.model import MODEL_TYPE, build_recurrent
from plimsoll.models.skeleton import Skeleton, Slot, Weight, slots_of
from plimsoll.weights.loading import Checkpoint


def recurrent_fields(folder: Path) -> dict[str, Any] | None:
    """Return the configuration of a recurrent model, or ``None`` if the folder holds another kind of model."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(fields, dict) and fields.get("architecture") in RECURRENT
    is_ours = is_ours and fields.get("model_type", MODEL_TYPE) == MODEL_TYPE  # older folders have no model_type
    return fields if is_ours else None


def recurrent_skeleton(
    checkpoint: Checkpoint, fields: dict[str, Any], dtype: torch.dtype | None, asked: Mapping[str, Any]
) -> Skeleton:
    """Build the skeleton of a recurrent model.

    Args:
        checkpoint: the checkpoint of the model.
        fields: the configuration of the model.
        dtype: the dtype of the weights; ``None``: the stored dtype of each weight.
        asked: further options of `load_model` by name, none of which a recurrent model supports; ``None`` is ignored.

    Raises:
        WeightsError: if the weights do not fit the configuration, or an option is not ``None``.
    """
    for name, value in asked.items():
        if value is not None:
            raise WeightsError(f"{checkpoint.folder} is a recurrent model, which has no {name} {value}: leave it out")
    try:
        with torch.device("meta"):
            model: Any = build_recurrent(fields)
    except JobError as error:
        raise WeightsError(f"{checkpoint.folder}: {error}; save the model again") from None
    places: dict[int, list[tuple[str, Slot]]] = {}
    for name, slot, value in slots_of(model):
        places.setdefault(id(value), []).append((name, slot))
    made = Skeleton(model)
    for found in places.values():
        names, slots = [name for name, _ in found], tuple(slot for _, slot in found)
        stored = next((checkpoint.entries[name] for name in names if name in checkpoint.entries), None)
        meta = getattr(*slots[0])
        if stored is None or stored.shape != tuple(meta.shape):
            shape = "is missing" if stored is None else f"has shape {stored.shape}"
            raise WeightsError(
                f"`{names[0]}` {shape} in {checkpoint.folder}, but has shape {tuple(meta.shape)} in the model its "
                "config.json describes: save the model again"
            )
        wanted = torch.nn.Parameter(meta.detach().to(dtype or stored.dtype))
        made.weights[names[0]] = Weight(names[0], slots, wanted, stored)
    known = {weight.entry.name for weight in made.weights.values() if weight.entry is not None}
    made.unexpected = tuple(sorted(checkpoint.entries.keys() - known))
    return made
