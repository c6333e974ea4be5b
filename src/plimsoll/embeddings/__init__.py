"""Pretrained word vectors: only the needed rows, in little memory.

    from plimsoll import embeddings

    subset = embeddings.subset("glove.840B.300d.zip", tokenizer)      # once; from the cache in milliseconds after that
    print(plimsoll.render(subset.facts))                              # words that were found and words that were not
    embedding = embeddings.load(subset, trainable=True)               # an nn.Embedding mapped from the cached file

Names are imported when they are first used, so taking a subset does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plimsoll.embeddings.compressed import FactorizedEmbedding as FactorizedEmbedding
    from plimsoll.embeddings.compressed import ProductQuantizedEmbedding as ProductQuantizedEmbedding
    from plimsoll.embeddings.compressed import low_rank as low_rank
    from plimsoll.embeddings.compressed import product_quantized as product_quantized
    from plimsoll.embeddings.conversion import convert as convert
    from plimsoll.embeddings.host import HostEmbedding as HostEmbedding
    from plimsoll.embeddings.host_optimizer import optimizer_of as optimizer_of
    from plimsoll.embeddings.inspect import look_at as info  # noqa: F401
    from plimsoll.embeddings.module import load as load
    from plimsoll.embeddings.module import tied_output as tied_output
    from plimsoll.embeddings.subsets import Subset as Subset
    from plimsoll.embeddings.subsets import take_subset as subset  # noqa: F401

_HOMES = {
    "FactorizedEmbedding": ("compressed", "FactorizedEmbedding"),
    "HostEmbedding": ("host", "HostEmbedding"),
    "ProductQuantizedEmbedding": ("compressed", "ProductQuantizedEmbedding"),
    "Subset": ("subsets", "Subset"),
    "convert": ("conversion", "convert"),
    "info": ("inspect", "look_at"),
    "load": ("module", "load"),
    "low_rank": ("compressed", "low_rank"),
    "optimizer_of": ("host_optimizer", "optimizer_of"),
    "product_quantized": ("compressed", "product_quantized"),
    "subset": ("subsets", "take_subset"),
    "tied_output": ("module", "tied_output"),
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return __all__
