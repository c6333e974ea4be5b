"""Text generation with a causal transformers model: its ``generate``, with random draws that ignore the batch.

Greedy decoding is the default. Sampling adds Gumbel noise to each logit, drawn for the row, position and token, and
takes the largest. The distribution is the same as with ``softmax`` and ``multinomial``
(https://arxiv.org/abs/1611.01144, section 2). The draw for a row depends neither on the other rows of the batch nor on
where a run was resumed.

Prompts are padded on the left. Transformers' own key-value cache is used: on the device, or ``offloaded`` to host
memory, which needs CUDA.

Not handled: beam search, stop words, chat templates, and a quantized cache. The latter needs another package, and
transformers keeps its last tokens unquantized.

Shapes: B prompts, T prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Cache = Literal["full", "offloaded"]


@dataclass(frozen=True)
class Generation:
    """The options of generation.

    Attributes:
        max_new_tokens: the maximum number of new tokens per text.
        temperature: the temperature of sampling; ``None``: greedy decoding.
        top_p: sample only from the most likely tokens: the smallest set whose total probability reaches this value.
        seed: the seed of the random draws.
        cache: ``full`` keeps the key-value cache on the device, ``offloaded`` in host memory.
    """

    max_new_tokens: int
    temperature: float | None = None
    top_p: float = 1.0
    seed: int = 0
    cache: Cache = "full"


@dataclass(frozen=True)
class Continuation:
    """The new tokens of a text without the end token. ``stopped``: whether the end token was reached."""

    ids: list[int]
    stopped: bool


def generate(
    model: PreTrainedModel, batch: dict[str, Tensor], rows: Sequence[int], options: Generation, padding_id: int
) -> list[Continuation]:
    """Return the continuation of each prompt of a batch.

    Args:
        model: the model, in evaluation mode.
        batch: ``input_ids`` and ``attention_mask``, (B, T), padded on the left.
        rows: the number of each prompt in the whole input, which seeds its draws.
        options: see `Generation`.
        padding_id: the id of the token that pads finished texts.
    """
    end_ids = _end_ids(model)
    num_prompt_tokens = batch["input_ids"].shape[1]
    tokens: Any = model.generate(  # type: ignore[operator]
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        generation_config=_config(model, options, padding_id),
        logits_processor=LogitsProcessorList(_processors(rows, options, num_prompt_tokens)),
    )
    return [_continuation(row, end_ids) for row in tokens[:, num_prompt_tokens:].tolist()]


def _config(model: PreTrainedModel, options: Generation, padding_id: int) -> Any:
    from transformers import GenerationConfig

    own: Any = model.generation_config
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        pad_token_id=padding_id,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        use_cache=True,
        cache_implementation=None if options.cache == "full" else options.cache,
    )


def _end_ids(model: PreTrainedModel) -> set[int]:
    own: Any = model.generation_config
    found = own.eos_token_id
    return set(found) if isinstance(found, list) else set() if found is None else {found}


def _continuation(ids: list[int], end_ids: set[int]) -> Continuation:
    end = next((place for place, token in enumerate(ids) if token in end_ids), None)
    return Continuation(ids if end is None else ids[:end], end is not None)


def _processors(rows: Sequence[int], options: Generation, num_prompt_tokens: int) -> list[LogitsProcessor]:
    return [] if options.temperature is None else [_Draws(rows, options, num_prompt_tokens)]


class _Draws(LogitsProcessor):
    """A logits processor that turns greedy decoding into sampling: it applies temperature and top-p, and adds noise."""

    def __init__(self, rows: Sequence[int], options: Generation, num_prompt_tokens: int) -> None:
        self._rows, self._options, self._num_prompt_tokens = rows, options, num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place, temperature = input_ids.shape[1] - self._num_prompt_tokens, self._options.temperature
        assert temperature is not None
        scores_BV = _likeliest(scores.float() / temperature, self._options.top_p)
        for number, row in enumerate(self._rows):
            scores_BV[number] += _noise(self._options.seed, row, place, scores_BV.shape[1]).to(scores.device)
        return scores_BV


def _likeliest(scores_BV: Tensor, top_p: float) -> Tensor:
    """Mask all but the most likely tokens: keep the fewest whose total probability reaches ``top_p``."""
    if top_p >= 1:
        return scores_BV.clone()
    sorted_BV, order_BV = scores_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.softmax(dim=-1).cumsum(dim=-1) - sorted_BV.softmax(dim=-1)
    is_out_BV = torch.zeros_like(scores_BV, dtype=torch.bool).scatter(1, order_BV, before_BV >= top_p)
    return scores_BV.masked_fill(is_out_BV, float("-inf"))


def _noise(seed: int, row: int, place: int, vocab_size: int) -> Tensor:
    """Return reproducible Gumbel noise (V,) for one position in one row."""
    digest = hashlib.blake2b(f"{seed} {row} {place}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return -torch.empty(vocab_size).exponential_(generator=generator).log()
