"""The parts of a model that can lie in different places while it is applied.

Each repeated block is one (`plimsoll.techniques.mechanisms.blocks`), in the order of the model; then the output layer,
whole, also where it is tied to the embeddings; the tables of embeddings, which are read by row; and the rest, which is
small and always on the device. A weight that several parts share belongs to the first of them. Buffers are in no part:
they are where the model is.

Does NOT find blocks under names without a number; such a model has no part that can be streamed but its output layer.
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
    """A part: its name, its weights as the model has them (those of one storage all), and the bytes of their storages.

    ``module`` is that of a block, ``None`` of the other kinds.
    """

    name: str
    kind: Kind
    module: nn.Module | None
    weights: tuple[nn.Parameter, ...]
    num_bytes: int

    @property
    def is_streamable(self) -> bool:
        """Whether a pass reads all of it, in an order that is known."""
        return self.kind in ("block", "output")


def parts_of(model: nn.Module) -> tuple[ModelPart, ...]:
    """Return the parts of a model, on any device; a part without weights is left out."""
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
    """Return those of the names of parts that are of blocks, in the order of the model."""
    return tuple(part.name for part in parts_of(model) if part.module is not None and part.name in names)


def _output_of(model: nn.Module) -> nn.Module | None:
    """The layer onto the vocabulary, as models of transformers tell it."""
    ask = getattr(model, "get_output_embeddings", None)
    found = ask() if ask is not None else None
    return found if isinstance(found, nn.Module) else None


def _num_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes of weights, each once; on the meta device storages are told apart by their tensors."""
    return sum(map(stored_bytes, weights))
