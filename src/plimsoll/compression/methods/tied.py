"""The output layer over the vocabulary shares the weight of the embedding, which is then saved once.

Many models tie the two from the start (Press and Wolf 2016, arXiv:1608.05859). A model that was trained with two
weights needs further training, since its output weight is discarded. The result is a plain model: the configuration has
a field for it (``tie_word_embeddings``, or ``tie_weights`` of a recurrent model of Plimsoll).

Not handled: models without an output layer over the vocabulary, weights of different sizes, and the adaptive softmax.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice


class Tied(Shrinker):
    """Sharing of one weight by embedding and output."""

    name = "tied"
    saves = (
        "the file, and the memory of weights, gradients and optimizer states, by the weight of the output layer; "
        "inference time is unchanged"
    )

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why the weights cannot be tied; ``None`` if they can."""
        name = type(bundle.model).__name__
        table, output = _tables(bundle.model)
        if type(table) is not nn.Embedding or type(output) is not nn.Linear:
            return (
                f"{name} has no embedding and output to tie: looked for an nn.Embedding and an nn.Linear over the "
                f"vocabulary, and found {type(table).__name__} and {type(output).__name__}; use a language model"
            )
        if output.weight is table.weight:
            return f"the output of {name} is already tied to its embedding: leave `tied` out"
        if output.weight.shape != table.weight.shape:
            return (
                f"the output has the shape {tuple(output.weight.shape)} and the embedding {tuple(table.weight.shape)}: "
                "use `hidden` or `low_rank_embeddings` instead"
            )
        if not _is_recurrent(bundle.model) and not getattr(bundle.model, "_tied_weights_keys", None):
            return f"the class {name} of transformers cannot tie its weights: leave `tied` out"
        return None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Tie the output to the embedding."""
        model: Any = bundle.model
        table, output = _tables(model)
        if _is_recurrent(model):
            model.config = model.config.model_copy(update={"tie_weights": True})
            output.weight = table.weight
            return
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = True
        model.tie_weights()
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _is_recurrent(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "tie_weights") and hasattr(model.config, "model_copy")


def _tables(model: Any) -> tuple[Any, Any]:
    """Return the token embedding and the output layer over the vocabulary; ``None`` for a missing module."""
    if _is_recurrent(model):
        is_language_model = model.config.num_labels is None
        return model.embedding, model.head if is_language_model else None
    if not hasattr(model, "get_output_embeddings"):
        return None, None
    return model.get_input_embeddings(), model.get_output_embeddings()
