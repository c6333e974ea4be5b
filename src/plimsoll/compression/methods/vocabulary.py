"""Only the tokens of a corpus: fewer rows in the embedding and in the output over the vocabulary.

The results on that corpus do not change: its texts have the same tokens, under new ids (see `token_needs`), and the
logits of the kept tokens are bitwise equal. Perplexity falls, since the probability is divided among fewer tokens. The
model is not better for this.

Not handled: the adaptive softmax, whose clusters are frequency ranks; hashed embeddings; several vocabularies; and slow
tokenizers. Abdaoui et al. 2020 (arXiv:2010.05609) reduce multilingual BERT to some languages in this way.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.compression.base import Bundle, Calibration, Shrinker
from plimsoll.compression.token_needs import KINDS, tokens_needed, with_only
from plimsoll.errors import WeightsError
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import options_of
from plimsoll.weights.structure import class_for, tell_sizes


class Slot(NamedTuple):
    """A parameter or buffer with one entry per token along ``dim``."""

    module: nn.Module
    name: str
    dim: int


class Vocabulary(Shrinker):
    """Removal of tokens that the corpus does not contain."""

    name = "vocabulary"
    saves = (
        "the file, and the memory of weights, gradients and optimizer states, by the removed rows; in a language model "
        "also the time and memory of its logits; the time of embedding lookups does not change"
    )
    reads_corpus = True

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why tokens cannot be removed: no fast tokenizer, or no weights with a row per token; else ``None``."""
        if bundle.tokenizer is None:
            return "the model has no tokenizer to reduce: give a model folder that has its tokenizer.json"
        backend = getattr(bundle.tokenizer, "backend_tokenizer", None)
        kind = type(bundle.tokenizer).__name__ if backend is None else type(backend.model).__name__
        if kind not in KINDS:
            return f"the tokenizer is a {kind}, but only {', '.join(KINDS)} are supported: use one of these"
        return _refusal_of_model(bundle.model)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Remove the tokens that are rare in the corpus, and their rows in the embedding and output weights.

        Without token counts, when only the size of the result is needed, remove only the rows that no token uses.

        Raises:
            WeightsError: if the corpus has token ids that the model does not have.
        """
        tokenizer: Any = bundle.tokenizer
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        num_rows = _num_tokens(bundle.model)
        counts = calibration.token_counts
        if counts is None:
            counts = np.full(min(len(tokenizer), num_rows), _min_count(choice))
        occurring = _occurring(counts, _min_count(choice), num_rows, len(tokenizer))
        known = {*tokenizer.get_vocab().values()}
        special = {one for one in (*tokenizer.all_special_ids, *_special_numbers(bundle.model)) if one in known}
        kept = sorted(one for one in tokens_needed(described, occurring | special) if one < num_rows)
        slots = [*_slots(bundle.model)]
        kept = _from_padding_on(bundle.model, kept)
        text = with_only(described, kept)
        _keep_rows(slots, torch.tensor(kept))
        _renumber_config(bundle.model, kept)
        bundle.tokenizer = _with_backend(tokenizer, text)


def _min_count(choice: Choice) -> Any:
    return options_of(choice)["min_count"]


def _occurring(counts: NDArray[np.int64], min_count: int, num_rows: int, num_tokens: int) -> set[int]:
    found = {int(one) for one in np.flatnonzero(counts >= min_count)}
    beyond = [one for one in found if one >= num_rows]
    if beyond:
        raise WeightsError(
            f"the corpus has the token id {min(beyond)}, but the model has {num_rows} rows and its tokenizer "
            f"{num_tokens} tokens: use the tokenizer in the model's folder to count the corpus"
        )
    return {one for one in found if one < num_tokens}


def _num_tokens(model: Any) -> int:
    config = model.config
    nested = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(nested.vocab_size)


def _refusal_of_model(model: Any) -> str | None:
    config: Any = getattr(model, "config", None)
    if not isinstance(getattr(config, "vocab_size", None), int):
        return (
            f"{type(model).__name__} has no `vocab_size` in its configuration, so its token rows are unknown: use a "
            "transformers model, or a recurrent model of Plimsoll"
        )
    if getattr(config, "adaptive_cutoffs", None) is not None:
        return (
            f"the output is an adaptive softmax, whose clusters {config.adaptive_cutoffs} are frequency ranks: "
            "train with a smaller `tokenizer.vocab_size` instead"
        )
    if getattr(config, "is_encoder_decoder", False) and "shared" not in dict(model.named_children()):
        return f"{type(model).__name__} has embeddings for several vocabularies: use a model with one"
    try:
        tables = [slot for slot in _slots(model) if isinstance(slot.module, nn.Embedding)]
    except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:
        return f"{type(model).__name__} cannot be built with one more token ({error}): leave `vocabulary` out"
    if not tables:
        return f"{type(model).__name__} has no nn.Embedding with {config.vocab_size} rows: leave `vocabulary` out"
    return None


def _slots(model: Any) -> Iterator[Slot]:
    """Yield the parameters and buffers with one entry per token.

    They are recognised by their size, which is larger in a model with one more token.
    """
    larger = dict(_tensors(_with_tokens(model, _num_tokens(model) + 1)))
    for name, tensor in _tensors(model):
        dims = [
            dim for dim, pair in enumerate(zip(tensor.shape, larger[name].shape, strict=True)) if pair[0] != pair[1]
        ]
        if dims:
            path, _, last = name.rpartition(".")
            yield Slot(model.get_submodule(path), last, dims[0])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _with_tokens(model: Any, num_tokens: int) -> nn.Module:
    """Build a model of the same class and configuration, but with ``num_tokens`` tokens, on the meta device."""
    with torch.device("meta"):
        if hasattr(model.config, "model_copy"):  # pydantic: a recurrent model of Plimsoll
            return type(model)(model.config.model_copy(update={"vocab_size": num_tokens}))  # type: ignore[no-any-return]
        config = copy.deepcopy(model.config)
        config.get_text_config().vocab_size = num_tokens
        made: Any = class_for(type(model), config)
        return made._from_config(config, dtype=torch.float32)  # type: ignore[no-any-return]


def _from_padding_on(model: Any, kept: list[int]) -> list[int]:
    """Return the token ids to keep, ``kept``, plus those that must not move.

    If positions are numbered from the padding id, as in RoBERTa, all ids up to the padding id are added. The padding id
    then stays the same.
    """
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    first = max((table.padding_idx or 0 for table in tables if isinstance(table, nn.Embedding)), default=0)
    return sorted({*kept, *range(first + 1)}) if first else kept


def _keep_rows(slots: list[Slot], kept: Tensor) -> None:
    new: dict[int, Tensor] = {}
    tensors = [getattr(slot.module, slot.name) for slot in slots]  # kept alive, so that no id is reused
    for (module, name, dim), before in zip(slots, tensors, strict=True):
        if id(before) not in new:  # tied tensors stay tied
            values = before.detach().index_select(dim, kept.to(before.device))
            is_parameter = isinstance(before, nn.Parameter)
            new[id(before)] = nn.Parameter(values, requires_grad=before.requires_grad) if is_parameter else values
        setattr(module, name, new[id(before)])
    places = {old: number for number, old in enumerate(kept.tolist())}
    for module in dict.fromkeys(slot.module for slot in slots):
        if getattr(module, "weight", None) is not None:
            tell_sizes(module)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.padding_idx = places.get(module.padding_idx)


def _special_numbers(model: Any) -> set[int]:
    return {number for _, _, numbers in _number_fields(model) for number in numbers}


def _number_fields(model: Any) -> Iterator[tuple[Any, str, list[int]]]:
    """Yield the configuration fields with token ids, such as ``pad_token_id``: configuration, field name and ids."""
    config = model.config
    if hasattr(config, "model_copy"):
        return
    holders = {id(one): one for one in (config, config.get_text_config(), getattr(model, "generation_config", None))}
    for holder in holders.values():
        for name, value in (vars(holder) if holder is not None else {}).items():
            if name.endswith("_token_id") and value is not None:
                numbers = [*value] if isinstance(value, list) else [value]
                if all(isinstance(number, int) for number in numbers):
                    yield holder, name, numbers


def _renumber_config(model: Any, kept: list[int]) -> None:
    if hasattr(model.config, "model_copy"):
        model.config = model.config.model_copy(update={"vocab_size": len(kept)})
        return
    places = {old: number for number, old in enumerate(kept)}
    for holder, name, numbers in [*_number_fields(model)]:
        new = [places[number] for number in numbers if number in places]
        value: Any = new if isinstance(getattr(holder, name), list) else (new[0] if new else None)
        setattr(holder, name, value)
    model.config.get_text_config().vocab_size = len(kept)
    if hasattr(model, "vocab_size"):
        model.vocab_size = len(kept)


def _with_backend(tokenizer: Any, text: str) -> Any:
    """Return a copy of a transformers tokenizer whose backend is loaded from ``text``, the JSON of ``tokenizers``."""
    from tokenizers import Tokenizer

    made = copy.deepcopy(tokenizer)
    made._tokenizer = Tokenizer.from_str(text)
    return made
