"""Only the tokens that a corpus has: fewer rows in the embedding and in the output over the vocabulary.

Exact on that corpus: with the new tokenizer its texts have the same tokens (`token_needs` says why), with other
numbers, and the logits of the kept tokens are bitwise what they were. Perplexity is lower than before, for there are
fewer tokens to divide among: that is no better model.

It does NOT cover the adaptive softmax, whose clusters are ranks of frequency, tables that count tokens otherwise
(hashed or several vocabularies), and slow tokenizers. Abdaoui et al. 2020 (arXiv:2010.05609) keep the rows of some
languages of multilingual BERT in the same way.
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
    """A parameter or buffer with a number for each token along one of its dimensions."""

    module: nn.Module
    name: str
    dim: int


class Vocabulary(Shrinker):
    """Rows of tokens that the corpus does not have are taken away."""

    name = "vocabulary"
    saves = (
        "the file, the memory of the weights and of a training's optimizer states and gradients by the rows that are "
        "taken away, and of a language model the time and memory of its logits; an embedding's lookups take the same "
        "time"
    )
    reads_corpus = True

    def fault(self, bundle: Bundle, choice: Choice) -> str | None:
        """Return why this cannot be: no fast tokenizer, or weights that are not found by their number of rows."""
        if bundle.tokenizer is None:
            return "there is no tokenizer to take tokens from: give a model folder that has its tokenizer.json"
        backend = getattr(bundle.tokenizer, "backend_tokenizer", None)
        kind = type(bundle.tokenizer).__name__ if backend is None else type(backend.model).__name__
        if kind not in KINDS:
            return f"the tokenizer is a {kind}, and only {', '.join(KINDS)} are known: use one of these"
        return _refusal_of_model(bundle.model)

    def shrink(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        """Take the rows away, and the tokens; without counts, as for sizes alone, those are taken that none can have.

        Raises:
            WeightsError: if what the corpus has is not of this model's tokens.
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
            f"the corpus has the token {min(beyond)}, but the model has {num_rows} rows and its tokenizer {num_tokens} "
            "tokens: count the corpus with the model's own tokenizer, use the one in its folder"
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
            f"a {type(model).__name__} has no `vocab_size` in its configuration, so nothing says which rows are those "
            "of tokens: use a model of transformers, or a recurrent one of plimsoll"
        )
    if getattr(config, "adaptive_cutoffs", None) is not None:
        return (
            f"the output is an adaptive softmax, whose clusters {config.adaptive_cutoffs} are ranks of frequency: "
            "train with `model.vocab_size` of fewer tokens instead"
        )
    if getattr(config, "is_encoder_decoder", False) and "shared" not in dict(model.named_children()):
        return f"a {type(model).__name__} has tables of several vocabularies: use a model with one"
    try:
        tables = [slot for slot in _slots(model) if isinstance(slot.module, nn.Embedding)]
    except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:
        return f"a {type(model).__name__} cannot be built with one token more ({error}): leave `vocabulary` out"
    if not tables:
        return f"a {type(model).__name__} has no nn.Embedding with {config.vocab_size} rows: leave `vocabulary` out"
    return None


def _slots(model: Any) -> Iterator[Slot]:
    """Find what has a number for each token: it is one longer in a model that has one token more."""
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
    """The same sort of model on the meta device, with so many tokens."""
    with torch.device("meta"):
        if hasattr(model.config, "model_copy"):  # pydantic's: a recurrent model of ours
            return type(model)(model.config.model_copy(update={"vocab_size": num_tokens}))  # type: ignore[no-any-return]
        config = copy.deepcopy(model.config)
        config.get_text_config().vocab_size = num_tokens
        made: Any = class_for(type(model), config)
        return made._from_config(config, dtype=torch.float32)  # type: ignore[no-any-return]


def _from_padding_on(model: Any, kept: list[int]) -> list[int]:
    """Where positions are counted from the padding's number on, as in RoBERTa, that number stays what it is."""
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    first = max((table.padding_idx or 0 for table in tables if isinstance(table, nn.Embedding)), default=0)
    return sorted({*kept, *range(first + 1)}) if first else kept


def _keep_rows(slots: list[Slot], kept: Tensor) -> None:
    new: dict[int, Tensor] = {}
    tensors = [getattr(slot.module, slot.name) for slot in slots]  # kept, so that no other gets the number of one
    for (module, name, dim), before in zip(slots, tensors, strict=True):
        if id(before) not in new:  # what is tied stays tied
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
    """The fields of configurations that hold numbers of tokens, such as those of padding, begin and end."""
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
    """The same tokenizer of transformers with another backend."""
    from tokenizers import Tokenizer

    made = copy.deepcopy(tokenizer)
    made._tokenizer = Tokenizer.from_str(text)
    return made
