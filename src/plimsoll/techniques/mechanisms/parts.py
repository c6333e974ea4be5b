"""The parts of a model that can be placed separately for inference.

The parts are, in this order: each repeated block (`plimsoll.techniques.mechanisms.blocks`); the whole output layer,
even if it is tied to the embeddings; the embedding tables, which are read by row; and the rest, which is small and
always on the device. A shared weight belongs to the first part that has it. Buffers belong to no part: they stay with
the model.

Not found: blocks under names without a number. The only streamable part of such a model is its output layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from torch import Tensor, nn

from plimsoll.techniques.mechanisms.blocks import blocks_of
from plimsoll.weights.parts import stored_bytes

OUTPUT, TABLES, REST = "output layer", "embeddings", "the rest"
Kind = Literal["block", "output", "tables", "rest"]


class ModelPart(NamedTuple):
    """A part of a model.

    Attributes:
        name: of the part.
        kind: of the part.
        module: the module of a block; ``None`` for other kinds.
        weights: its parameters, including all that share a storage.
        num_bytes: bytes of their storages.
    """

    name: str
    kind: Kind
    module: nn.Module | None
    weights: tuple[nn.Parameter, ...]
    num_bytes: int

    @property
    def is_streamable(self) -> bool:
        """True if a pass reads the whole part, in a known order."""
        return self.kind in ("block", "output")


def parts_of(model: nn.Module) -> tuple[ModelPart, ...]:
    """Return the parts of a model on any device, except for parts without weights."""
    of_weight: dict[int, nn.Parameter] = {id(weight): weight for weight in model.parameters()}
    taken: set[int] = set()

    def part(name: str, kind: Kind, weights: Iterable[nn.Parameter], module: nn.Module | None = None) -> ModelPart:
        own = tuple(weight for weight in weights if id(weight) not in taken)
        taken.update(id(weight) for weight in own)
        return ModelPart(name, kind, module, own, _num_bytes(own))

    found = [part(name, "block", block.parameters(), block) for name, block in blocks_of(model)]
    output = _output_of(model)
    if output is not None:
        found.append(part(OUTPUT, "output", output.parameters()))
    tables = (
        weight for module in model.modules() if isinstance(module, nn.Embedding) for weight in module.parameters()
    )
    found.append(part(TABLES, "tables", tables))
    found.append(part(REST, "rest", of_weight.values()))
    return tuple(one for one in found if one.weights)


def block_names(model: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """Return the names in ``names`` that are blocks, in the order of the model."""
    return tuple(part.name for part in parts_of(model) if part.module is not None and part.name in names)


def _output_of(model: nn.Module) -> nn.Module | None:
    """Return the layer onto the vocabulary, if the model defines ``get_output_embeddings``."""
    ask = getattr(model, "get_output_embeddings", None)
    found = ask() if ask is not None else None
    return found if isinstance(found, nn.Module) else None


def _num_bytes(weights: Iterable[Tensor]) -> int:
    """Return the bytes of weights, counting shared storages once; on the meta device each tensor is a storage."""
    return sum(map(stored_bytes, weights))
