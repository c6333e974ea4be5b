"""Detection of a model's repeated blocks, such as transformer layers, by structure alone.

Blocks are siblings of one class with submodules of their own. They are entries of a ``ModuleList`` or ``Sequential``
(``transformer.h.0``, ``encoder.layer.0``, ``model.layers.0``), or attributes whose names differ only in a number
(``block1``, ``block2``). Only the outermost such modules count. Together they must hold at least half of the weights,
not counting embeddings and weights with the shape of an embedding (an output layer). So small repeated heads are not
blocks.

It reads modules and shapes only, so it works on the meta device and with fake tensors. Not found: modules repeated
under names without a number. Stages of blocks, as in Swin, are not split.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

Blocks = tuple[tuple[str, nn.Module], ...]

_LEAST_SHARE = 0.5  # of the weights, for all blocks together ...
_LEAST_SHARE_OF_A_CLASS = 0.05  # ... and for one class: a hybrid may have one attention layer in eight


def blocks_of(model: nn.Module) -> Blocks:
    """Return the qualified names and modules of the repeated blocks, in the order of the model; may be empty."""
    embeddings = {module.weight.shape for module in model.modules() if type(module) is nn.Embedding}
    weights = {
        id(parameter): parameter.numel() for parameter in model.parameters() if parameter.shape not in embeddings
    }
    blocks = {id(block): (name, block) for name, block in _outermost(model, "")}
    num_weights_of: Counter[type] = Counter()
    for _, block in blocks.values():
        num_weights_of[type(block)] += sum(weights.get(id(parameter), 0) for parameter in block.parameters())
    total = sum(weights.values())
    classes = {kind for kind, num_weights in num_weights_of.items() if num_weights >= _LEAST_SHARE_OF_A_CLASS * total}
    if sum(num_weights_of[kind] for kind in classes) < max(_LEAST_SHARE * total, 1):
        return ()
    return tuple((name, block) for name, block in blocks.values() if type(block) in classes)


def _outermost(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of the outermost candidates for blocks below a module, in order."""
    children = list(module.named_children())
    alike = Counter(_kind(name, child) for name, child in children if _has_parts(child))
    is_list_of_one = isinstance(module, nn.ModuleList) and len(children) == 1
    for name, child in children:
        if _has_parts(child) and (alike[_kind(name, child)] > 1 or is_list_of_one):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def _kind(name: str, child: nn.Module) -> tuple[str, type]:
    """Return the properties that repeated siblings share: the name without its number, and the class."""
    return re.sub(r"\d+", "", name), type(child)


def _has_parts(module: nn.Module) -> bool:
    """Return whether a module may be a block: neither a container of modules nor a single layer of torch's."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    is_single = next(module.children(), None) is None and type(module).__module__.startswith("torch.nn.")
    return not is_single or isinstance(module, nn.RNNBase)
