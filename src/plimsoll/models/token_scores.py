"""The log-probability of each token of a text under a language model, without the logits of the whole text.

The model runs once, up to what its head reads; the head then goes over the positions a chunk at a time, so that no more
than `_CHUNK_NUMBERS` logits exist at once. Of a Hugging Face model the head is its own code, whatever it does beside
the matrix (a bias, a transform before it, soft caps, a scale): its ``forward`` is called again for each chunk, with the
body replaced by what it returned, cut to the chunk. Where the body cannot be told apart (the model calls none of its
modules that are one), the logits are made whole, and only their float32 copy is in chunks.

Padding must be on the right, where no token sees it. It does NOT cover masked language models and encoder-decoders.

Shapes: B texts, T tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.models.recurrent import RecurrentLanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_NUMBERS = 8 << 20
"""Logits at once, 32 MiB in float32: of 50,000 tokens 167 positions, enough that the matrix product is as fast as it
gets. The cross entropy holds as much again."""


def token_log_probabilities(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, chunk_numbers: int = _CHUNK_NUMBERS
) -> Tensor:
    """Return the log-probability of each token but the first, (B, T - 1) in float32, and 0 where it is padding.

    Args:
        model: a causal language model of transformers or a recurrent one of ours, in evaluation mode.
        input_ids: (B, T), padded on the right.
        attention_mask: (B, T), 1 for a token.
        chunk_numbers: the most logits at once; those of one position of all texts are made in any case.
    """
    num_predicted = input_ids.shape[1] - 1
    if num_predicted < 1:
        return torch.zeros((len(input_ids), 0), dtype=torch.float32, device=input_ids.device)
    chunk = max(1, chunk_numbers // (len(input_ids) * _vocab_size(model)))
    chunks = _chunks_of_recurrent if isinstance(model, RecurrentLanguageModel) else _chunks_of_hugging_face
    found = torch.empty((len(input_ids), num_predicted), dtype=torch.float32, device=input_ids.device)
    for begin, logits_BCV in chunks(cast(Any, model), input_ids, attention_mask, num_predicted, chunk):
        end = begin + logits_BCV.shape[1]
        targets_BC = input_ids[:, begin + 1 : end + 1]
        losses = functional.cross_entropy(logits_BCV.float().flatten(0, 1), targets_BC.flatten(), reduction="none")
        found[:, begin:end] = -losses.view(targets_BC.shape)
    return found.masked_fill(attention_mask[:, 1:] == 0, 0.0)


Chunks = Iterator[tuple[int, Tensor]]
"""The first position of some logits, and these."""


def _vocab_size(model: nn.Module) -> int:
    config: Any = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text_config.vocab_size)


def _chunks_of_recurrent(
    model: RecurrentLanguageModel, input_ids: Tensor, attention_mask: Tensor, num_predicted: int, chunk: int
) -> Chunks:
    hidden_BTH = model.hidden_states(input_ids)
    for begin in range(0, num_predicted, chunk):
        yield begin, model.logits_of(hidden_BTH[:, begin : min(begin + chunk, num_predicted)])


def _chunks_of_hugging_face(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, num_predicted: int, chunk: int
) -> Chunks:
    def call() -> Tensor:
        logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits

    body, kept = _body_of(model), []

    def first(run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        kept.append(run(*arguments, **named))
        return _cut(kept[0], 0, min(chunk, num_predicted))

    with _forward_of(body, first) if body is not None else nullcontext():
        logits_BCV = call()
    if not kept or logits_BCV.shape[1] == input_ids.shape[1]:  # another module is the body, or the head looks around
        for begin in range(0, num_predicted, chunk):
            yield begin, logits_BCV[:, begin : min(begin + chunk, num_predicted)]
        return
    assert body is not None
    yield 0, logits_BCV
    for begin in range(chunk, num_predicted, chunk):
        del logits_BCV  # of the chunk before, while the next is made
        with _forward_of(body, lambda run, *_, **__: _cut(kept[0], begin, min(begin + chunk, num_predicted))):  # noqa: B023
            logits_BCV = call()
        yield begin, logits_BCV


def _body_of(model: PreTrainedModel) -> nn.Module | None:
    """The module whose output the head reads: the innermost decoder, which some models call past their base model."""
    base: Any = model.base_model
    body: nn.Module = base.get_decoder()
    return None if body is model else body


def _cut(outputs: Any, begin: int, end: int) -> Any:
    """What the body returned, with some positions of its last hidden states.

    They are copied: with a part of each text that lies apart torch would multiply text by text, and oneDNN copies the
    weights of the head for it (30 MiB of 30,522 words of 512 numbers in bfloat16, for each text).
    """
    hidden_BCH = outputs[0][:, begin:end].contiguous()
    if isinstance(outputs, tuple):
        return (hidden_BCH, *outputs[1:])
    kept = {name: value for name, value in outputs.items() if name != "past_key_values"}
    return type(outputs)(**{**kept, "last_hidden_state": hidden_BCH})


@contextmanager
def _forward_of(module: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Have ``replacement`` called in place of a module's ``forward``, which it gets, while the block runs."""
    own = vars(module).get("forward")
    run = module.forward
    module.forward = lambda *arguments, **named: replacement(run, *arguments, **named)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
