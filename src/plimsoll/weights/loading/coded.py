"""Quantized weights of torchao, each stored in a file as several tensors that the header assigns to the weight.

``save_pretrained`` of a quantized model writes ``x._weight_qdata``, ``x._weight_scale`` and so on for a weight
``x.weight``. The header of each file names the torchao class of the weight (``torchao.prototype.safetensors``, 0.18).
This module merges these tensors into one entry under the name of the weight, with the original type and shape. `Coded`
builds the weight. Only classes that torchao lists are allowed.

Does NOT cover weights quantized by other libraries (GPTQ, AWQ, bitsandbytes).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plimsoll.errors import WeightsError
from plimsoll.weights.loading.entries import Entry

_PLAIN = "Tensor"


@dataclass(frozen=True)
class Coded:
    """A weight of torchao in a file.

    Attributes:
        entry: the weight as a whole: original type and shape, offset of its integers, bytes of all parts.
        parts: the tensors in the file that make up the weight, by the attribute names of the torchao class.
        facts: the description of the weight in the header: its torchao class and the class's other arguments.
    """

    entry: Entry
    parts: Mapping[str, Entry]
    facts: Mapping[str, Any]

    def make(self, value_of: Callable[[Entry], Tensor]) -> Tensor:
        """Build the weight from its parts; ``value_of`` returns the tensor of each part."""
        return _made(self.facts, {name: value_of(entry) for name, entry in self.parts.items()}, self.entry.name)


def with_coded(entries: Mapping[str, Entry], metadata: Mapping[str, Any]) -> tuple[dict[str, Entry], dict[str, Coded]]:
    """Return the entries of a checkpoint with parts of quantized weights merged, and the quantized weights by name.

    Args:
        entries: the tensors in the checkpoint's files, by name.
        metadata: the metadata in the headers of the checkpoint's files.

    Raises:
        WeightsError: if torchao is not installed, a part is missing, or the parts do not belong together.
    """
    coded = {name: _coded(name, facts, entries) for name, facts in _facts(metadata).items()}
    taken = {part.name for one in coded.values() for part in one.parts.values()}
    owner = {min(part.name for part in one.parts.values()): one.entry for one in coded.values()}
    found: dict[str, Entry] = {}
    for name, entry in entries.items():  # in the order of the files
        if name in owner:
            found[owner[name].name] = owner[name]
        elif name not in taken:
            found[name] = entry
    return found, coded


def _facts(metadata: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the description of each weight that is not a plain tensor, by the weight's name."""
    try:
        names = json.loads(metadata.get("tensor_names", "[]"))
        said = {name: json.loads(metadata[name]) for name in names}
        return {name: facts for name, facts in said.items() if facts["_type"] != _PLAIN}
    except (ValueError, LookupError, TypeError) as error:
        raise WeightsError(
            f"cannot read from the header ({len(metadata)} fields) which tensors form the quantized weights "
            f"({error}): save the model again"
        ) from None


def _coded(name: str, facts: dict[str, Any], entries: Mapping[str, Entry]) -> Coded:
    module, _, last = name.rpartition(".")
    parts = {part: f"{module}._{last}_{part}" for part in facts.get("_tensor_data_names", ())}
    missing = [full for full in parts.values() if full not in entries]
    if missing or not parts:
        raise WeightsError(
            f"`{name}` is a {facts['_type']} of {len(parts)} parts, of which {len(missing)} are missing "
            f"({', '.join(missing[:3])}): download or save the model again"
        )
    own = {part: entries[full] for part, full in parts.items()}
    whole = _made(
        facts, {part: torch.empty(one.shape, dtype=one.dtype, device="meta") for part, one in own.items()}, name
    )
    first = own.get("qdata", next(iter(own.values())))
    num_bytes = sum(one.num_bytes for one in own.values())
    entry = Entry(name, whole.dtype, tuple(whole.shape), first.source, first.offset, num_bytes)
    return Coded(entry, own, facts)


def _made(facts: Mapping[str, Any], parts: Mapping[str, Tensor], name: str) -> Tensor:
    try:
        from torchao.prototype.safetensors.safetensors_utils import object_from_dict
    except ImportError as error:
        raise WeightsError(
            f"`{name}` is a {facts['_type']} of torchao, which cannot be imported ({error}): install it with "
            "`pip install torch-plimsoll[quantize]`"
        ) from None
    try:
        made: Tensor = object_from_dict({**facts, "_data": {**facts["_data"], **parts}})
    except (ValueError, LookupError, TypeError) as error:
        raise WeightsError(
            f"`{name}` cannot be built from its {len(parts)} parts ({error}): save the model again with the installed "
            "version of torchao"
        ) from None
    return made
