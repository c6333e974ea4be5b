"""The parts of a model that can be placed separately for inference.

The parts are, in this order: each repeated block (`plimsoll.techniques.mechanisms.blocks`); the whole output layer,
even if it is tied to the embeddings; the embedding tables, which are read by row; and all other weights, which are
small and always on the device. A shared weight belongs to the first part that has it. Buffers belong to no part: they
stay with the model.

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
        name: the qualified name of a block, or the name of another part.
        kind: a block, the output layer, the embedding tables, or all other weights.
        module: the module of a block; ``None`` for other parts.
        weights: the parameters of the part, including parameters that share a storage.
        num_bytes: bytes that ``weights`` take in memory.
    """

    name: str
    kind: Kind
    module: nn.Module | None
    weights: tuple[nn.Parameter, ...]
    num_bytes: int

    @property
    def is_streamable(self) -> bool:
        """True if each pass reads the whole part, at a known point in the order of parts."""
        return self.kind in ("block", "output")


def parts_of(model: nn.Module) -> tuple[ModelPart, ...]:
    """Return the parts of a model that have weights. The model may be on any device."""
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
    """Return the block names that occur in ``names``, in the order of the model."""
    return tuple(part.name for part in parts_of(model) if part.module is not None and part.name in names)


def _output_of(model: nn.Module) -> nn.Module | None:
    """Return the result of the model's ``get_output_embeddings``; ``None`` without this method or an output layer."""
    ask = getattr(model, "get_output_embeddings", None)
    found = ask() if ask is not None else None
    return found if isinstance(found, nn.Module) else None


def _num_bytes(weights: Iterable[Tensor]) -> int:
    """Return the bytes that weights take in memory; quantized weights count as stored."""
    return sum(map(stored_bytes, weights))
