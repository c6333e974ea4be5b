"""The output over the vocabulary gets the rows of the embedding, which are then saved once.

As models are made that tie the two from the start (Press and Wolf 2016, arXiv:1608.05859). A model that was trained
with two tables needs to be trained on: its output rows are thrown away. It is plain afterwards: the configuration has
a field for it (``tie_word_embeddings``, or ``tie_weights`` of a recurrent model of ours).

It does NOT cover models without an output over the vocabulary, tables of different sizes, and the adaptive softmax.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.records.plan import Choice


class Tied(Shrinker):
    """One table for what goes in and what comes out."""

    name = "tied"
    saves = (
        "the file, the memory of the weights and of a training's gradients and optimizer states, by the output's "
        "table; not time: the output is computed as before"
    )

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why this cannot be."""
        name = type(bundle.model).__name__
        table, output = _tables(bundle.model)
        if type(table) is not nn.Embedding or type(output) is not nn.Linear:
            return (
                f"no pair of tables: looked for an nn.Embedding and an nn.Linear over the vocabulary in a {name}, and "
                f"found {type(table).__name__} and {type(output).__name__}; use a language model that has both"
            )
        if output.weight is table.weight:
            return f"the output of a {name} is tied to its embedding already: leave `tied` out"
        if output.weight.shape != table.weight.shape:
            return (
                f"the output has {tuple(output.weight.shape)} numbers and the embedding {tuple(table.weight.shape)}: "
                "use `hidden` or `low_rank_embeddings` instead"
            )
        if not _is_recurrent(bundle.model) and not getattr(bundle.model, "_tied_weights_keys", None):
            return f"the class {name} of transformers cannot tie its tables: leave `tied` out"
        return None

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Let the output have the embedding's rows."""
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
    """The table of tokens and the output over them; ``None`` where there is none."""
    if _is_recurrent(model):
        is_language_model = model.config.num_labels is None
        return model.embedding, model.head if is_language_model else None
    if not hasattr(model, "get_output_embeddings"):
        return None, None
    return model.get_input_embeddings(), model.get_output_embeddings()
