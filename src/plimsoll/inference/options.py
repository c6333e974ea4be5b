"""Checks of the options of ``plimsoll apply`` before the model is loaded. Only generation options import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from plimsoll.errors import InputError, OutputError
from plimsoll.records.apply import Dtype

if TYPE_CHECKING:
    from plimsoll.models.generation import Cache, Generation

_OTHER_FORMS = {".csv", ".tsv", ".parquet", ".arrow", ".npy", ".npz", ".txt", ".html"}


def require_known(out: Path, dtype: str, quantize: str | None, cache: str) -> None:
    """Raise an error if an option has an unknown value.

    Args:
        out: the file for results.
        dtype: data type of the weights.
        quantize: quantization of linear layers; ``None`` for none.
        cache: where keys and values are kept during generation.

    Raises:
        InputError: if a value is unknown; the message lists the known values.
        OutputError: if the suffix of ``out`` belongs to another format.
    """
    if out.suffix.lower() in _OTHER_FORMS:
        raise OutputError(
            f"results are JSON lines, but --out {out} ends in {out.suffix}: give it a name that ends in .jsonl"
        )
    if dtype not in (words := get_args(Dtype)):
        raise InputError(f"--dtype {dtype} is not supported for weights: give one of {', '.join(words)}")
    if quantize not in {None, "int8", "int4"}:
        raise InputError(f"--quantize {quantize} is not supported: give int8 or int4, or leave it out")
    if cache not in {"full", "offloaded"}:
        raise InputError(f"--cache {cache} is not supported: give full or offloaded")


def generation_of(
    max_new_tokens: int | None, temperature: float | None, top_p: float, seed: int, cache: Cache
) -> Generation | None:
    """Return the options for generating text; ``None`` if ``max_new_tokens`` is ``None``.

    Raises:
        InputError: if a number is out of range, or ``temperature`` or ``cache`` is set without ``max_new_tokens``.
    """
    if max_new_tokens is None:
        if temperature is not None:
            raise InputError(
                f"--temperature {temperature} needs --max-new-tokens: give that too, or leave --temperature out"
            )
        if cache != "full":
            raise InputError(f"--cache {cache} needs --max-new-tokens: give that too, or leave --cache out")
        return None
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {max_new_tokens} generates nothing: give 1 or more")
    if temperature is not None and not 0 < temperature < float("inf"):
        raise InputError(
            f"--temperature {temperature} is not a finite number above 0: give one, or leave it out for greedy decoding"
        )
    if not 0 < top_p <= 1:
        raise InputError(f"--top-p {top_p} is not a probability: give a number above 0 and at most 1")
    from plimsoll.models.generation import Generation

    return Generation(max_new_tokens, temperature, top_p, seed, cache)
