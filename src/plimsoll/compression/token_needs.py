"""Selection of the tokens that texts need, and a tokenizer with only these.

It works on the JSON of the ``tokenizers`` library (0.23). If all tokens of a text are kept, the reduced tokenizer
splits it into the same tokens. Other texts are split into smaller tokens, or contain the unknown token. The single
characters of kept tokens are kept, and all bytes of byte-level tokenizers.

Not handled: tokenizer models that are not in `KINDS`, and added tokens that are not in the model's vocabulary but have
ids between its ids.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from plimsoll.errors import WeightsError

KINDS = ("BPE", "WordPiece", "WordLevel", "Unigram")

_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def tokens_needed(tokenizer: Mapping[str, Any], occurring: Iterable[int]) -> set[int]:
    """Return the ids of the tokens that a reduced tokenizer needs.

    Args:
        tokenizer: the JSON of the tokenizer, parsed.
        occurring: ids of the tokens that occur in texts. Texts of only these tokens keep their tokenization.
    """
    model = tokenizer["model"]
    ids = vocabulary_of(model)
    words = {number: word for word, number in ids.items()}
    kept = set(occurring) | {token["id"] for token in tokenizer["added_tokens"]} | _ids_of_template(tokenizer)
    unknown = model.get("unk_token")
    if unknown in ids:
        kept.add(ids[unknown])
    kept |= {ids[byte] for byte in _BYTE_TOKENS & ids.keys()} if model.get("byte_fallback") else set()
    # BPE always applies the possible merge with the lowest rank. All merges that lead to a token are kept, with their
    # results. They are the merges of the token's own characters, since no merge crosses the ends of a token.
    if model["type"] == "BPE":
        return kept | _steps_of_bpe(tokenizer, ids, [words[number] for number in kept if number in words])
    # Unigram splits a text such that the sum of scores is highest. That split remains possible, and removing tokens
    # adds no better one. The token with the lowest score is kept: it determines the score of an unknown character.
    if model["type"] == "Unigram":
        kept.add(min(range(len(model["vocab"])), key=lambda number: model["vocab"][number][1]))
        kept |= set() if model.get("unk_id") is None else {model["unk_id"]}
    if model["type"] == "WordLevel":  # its tokens are whole words, which are not split
        return kept
    # WordPiece takes the longest matching token. It occurs in the text, so it is kept.
    prefix = model.get("continuing_subword_prefix") or ""
    characters = {character for number in kept for character in words.get(number, "")}
    single = [form for character in characters for form in (character, prefix + character)]
    return kept | {ids[form] for form in single if form in ids}


def vocabulary_of(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each token in the vocabulary of a tokenizer's model, the entry ``model`` of its JSON."""
    if model["type"] == "Unigram":
        return {piece: number for number, (piece, _) in enumerate(model["vocab"])}
    return dict(model["vocab"])


def with_only(tokenizer: Mapping[str, Any], kept: list[int]) -> str:
    """Return the JSON of a tokenizer that is reduced to the ids ``kept``. New ids are the indices in ``kept``.

    Raises:
        WeightsError: if the ``tokenizers`` library would give an added token another id.
    """
    made: dict[str, Any] = json.loads(json.dumps(tokenizer))
    new = {old: number for number, old in enumerate(kept)}
    model = made["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in new]
        model["unk_id"] = None if model.get("unk_id") is None else new[model["unk_id"]]
    else:
        model["vocab"] = {word: new[old] for word, old in model["vocab"].items() if old in new}
    if model["type"] == "BPE":
        model["merges"] = [pair for pair in model["merges"] if _is_made_of(pair, model)]
    made["added_tokens"] = [token for token in made["added_tokens"] if token["id"] in new]
    for token in made["added_tokens"]:
        token["id"] = new[token["id"]]
    _renumber_template(made.get("post_processor"), new)
    if made.get("padding"):
        made["padding"]["pad_id"] = new.get(made["padding"]["pad_id"], 0)
    text = json.dumps(made, ensure_ascii=False)
    _check_numbers(text, tokenizer, kept)
    return text


def _check_numbers(text: str, before: Mapping[str, Any], kept: list[int]) -> None:
    from tokenizers import Tokenizer

    made, old = Tokenizer.from_str(text), Tokenizer.from_str(json.dumps(before))
    for number, token in enumerate(kept):
        if made.id_to_token(number) != old.id_to_token(token):
            raise WeightsError(
                f"the tokenizer would give `{old.id_to_token(token)}` another id than {number}, because the ids of "
                "its added tokens do not start right after the model's ids: leave `vocabulary` out"
            )


def _steps_of_bpe(tokenizer: Mapping[str, Any], ids: Mapping[str, int], kept: list[str]) -> set[int]:
    """Return the ids of the tokens that BPE creates and merges on the way to each token of ``kept``.

    If the tokenizer is byte-level, the ids of all bytes are included.
    """
    model = tokenizer["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    ranks = {_pair(merge): rank for rank, merge in enumerate(model["merges"])}
    found = set()
    for word in kept:
        found |= _parts_on_the_way(word, ranks, prefix, model.get("end_of_word_suffix") or "")
    if '"ByteLevel"' in json.dumps([tokenizer.get("pre_tokenizer"), tokenizer.get("decoder")]):
        from tokenizers.pre_tokenizers import ByteLevel

        found |= set(ByteLevel.alphabet())
    return {ids[part] for part in found if part in ids}


def _parts_on_the_way(word: str, ranks: Mapping[tuple[str, str], int], prefix: str, suffix: str) -> set[str]:
    """Return the characters of the token ``word``, and all tokens that BPE makes when it merges them to ``word``."""
    is_last = bool(suffix) and word.endswith(suffix)
    is_inner = bool(prefix) and word.startswith(prefix)
    parts = [*word.removeprefix(prefix if is_inner else "").removesuffix(suffix if is_last else "")]
    parts = [part if number == 0 and not is_inner else prefix + part for number, part in enumerate(parts)]
    if is_last and parts:
        parts[-1] += suffix
    found = set(parts)
    while len(parts) > 1:
        pairs = [(ranks.get(pair), place) for place, pair in enumerate(itertools.pairwise(parts))]
        rank, place = min(((rank, place) for rank, place in pairs if rank is not None), default=(None, 0))
        if rank is None:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1].removeprefix(prefix)]
        found.add(parts[place])
    return found


def _pair(merge: Any) -> tuple[str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _is_made_of(merge: Any, model: Mapping[str, Any]) -> bool:
    (first, second), words = _pair(merge), model["vocab"]
    prefix = model.get("continuing_subword_prefix") or ""
    return first in words and second in words and first + second.removeprefix(prefix) in words


def _ids_of_template(tokenizer: Mapping[str, Any]) -> set[int]:
    return set(_numbers_in(tokenizer.get("post_processor")))


def _numbers_in(processor: Any) -> Iterable[int]:
    if not processor:
        return
    for inner in processor.get("processors", ()):
        yield from _numbers_in(inner)
    tokens = processor.get("special_tokens")
    for token in tokens.values() if isinstance(tokens, dict) else ():
        yield from token["ids"]
    for name in ("sep", "cls"):
        if name in processor:
            yield processor[name][1]


def _renumber_template(processor: Any, new: Mapping[int, int]) -> None:
    if not processor:
        return
    for inner in processor.get("processors", ()):
        _renumber_template(inner, new)
    tokens = processor.get("special_tokens")
    for token in tokens.values() if isinstance(tokens, dict) else ():
        token["ids"] = [new[old] for old in token["ids"]]
    for name in ("sep", "cls"):
        if name in processor:
            processor[name][1] = new[processor[name][1]]
