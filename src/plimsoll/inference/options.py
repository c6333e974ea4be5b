"""Options of applying a model, refused before anything is loaded; does not import torch where that is not needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from plimsoll.errors import InputError, OutputError
from plimsoll.records.apply import Dtype

if TYPE_CHECKING:
    from plimsoll.models.generation import Cache, Generation

_OTHER_FORMS = {".csv", ".tsv", ".parquet", ".arrow", ".npy", ".npz", ".txt", ".html"}


def require_known(out: Path, dtype: str, quantize: str | None, cache: str) -> None:
    """Refuse a name for results, and words for data types and caches, that there are not.

    Raises:
        InputError: it says what to give.
        OutputError: if the results would be called like another format.
    """
    if out.suffix.lower() in _OTHER_FORMS:
        raise OutputError(f"results are JSON lines, and {out} is called {out.suffix}: give --out a name in .jsonl")
    if dtype not in (words := get_args(Dtype)):
        raise InputError(f"--dtype {dtype} is none that weights can have here: give one of {', '.join(words)}")
    if quantize not in {None, "int8", "int4"}:
        raise InputError(f"--quantize {quantize} is none that there is: give int8 or int4, or leave it out")
    if cache not in {"full", "offloaded"}:
        raise InputError(f"--cache {cache} is none that there is: give full or offloaded")


def generation_of(
    max_new_tokens: int | None, temperature: float | None, top_p: float, seed: int, cache: Cache
) -> Generation | None:
    """Return how new tokens are made; ``None`` where none are.

    Raises:
        InputError: if a number is out of its range, or is given without new tokens.
    """
    if max_new_tokens is None:
        if temperature is not None:
            raise InputError(
                f"--temperature {temperature} draws new tokens: give --max-new-tokens too, or leave it out"
            )
        if cache != "full":
            raise InputError(f"--cache {cache} is of new tokens: give --max-new-tokens too, or leave it out")
        return None
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {max_new_tokens} generates nothing: give 1 or more")
    if temperature is not None and not 0 < temperature < float("inf"):
        raise InputError(f"--temperature {temperature} is no temperature: give more than 0, or leave it out for 0")
    if not 0 < top_p <= 1:
        raise InputError(f"--top-p {top_p} is no share of probability: give more than 0 and at most 1")
    from plimsoll.models.generation import Generation

    return Generation(max_new_tokens, temperature, top_p, seed, cache)
