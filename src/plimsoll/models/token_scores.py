"""Log-probabilities of the tokens of a text under a language model, without the logits of the whole text.

The body of the model runs once. The head then runs on a chunk of positions at a time (`plimsoll.models.head_apart`),
with at most `_CHUNK_NUMBERS` logits. If head and body cannot be separated, all logits are computed, and only their
conversion to float32 runs in chunks.

Padding must be on the right, where no token sees it.

Not handled: masked language models and encoder-decoders.

Shapes: B texts, T tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.models.head_apart import head_apart

_CHUNK_NUMBERS = 8 << 20
"""The maximum number of logits of a chunk: 32 MiB in float32, and cross entropy needs as much again. With a vocabulary
of 50,000 tokens, a chunk has 167 positions, enough for the full speed of the matrix product."""


def token_log_probabilities(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, chunk_numbers: int = _CHUNK_NUMBERS
) -> Tensor:
    """Return the log-probability of each token but the first, (B, T - 1) in float32; 0 for padding.

    Args:
        model: a causal transformers model or a recurrent Plimsoll model, in evaluation mode.
        input_ids: (B, T), padded on the right.
        attention_mask: (B, T), 1 for a token and 0 for padding.
        chunk_numbers: the maximum number of logits per chunk; a chunk has at least one position of every text.
    """
    num_predicted = input_ids.shape[1] - 1
    if num_predicted < 1:
        return torch.zeros((len(input_ids), 0), dtype=torch.float32, device=input_ids.device)
    chunk = max(1, chunk_numbers // (len(input_ids) * _vocab_size(model)))
    fields = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    parts, logits_BCV = head_apart(model, fields, chunk)
    found = torch.empty((len(input_ids), num_predicted), dtype=torch.float32, device=input_ids.device)
    for begin in range(0, num_predicted, chunk):
        end = min(begin + chunk, num_predicted)
        if logits_BCV is None:
            logits_BCV = parts.head(parts.hidden_BTH[:, begin:end])
        targets_BC = input_ids[:, begin + 1 : end + 1]
        logits_NV = logits_BCV[:, : end - begin].float().flatten(0, 1)
        logits_BCV = None
        losses = functional.cross_entropy(logits_NV, targets_BC.flatten(), reduction="none")
        found[:, begin:end] = -losses.view(targets_BC.shape)
        del logits_NV  # before the next logits are computed
    return found.masked_fill(attention_mask[:, 1:] == 0, 0.0)


def _vocab_size(model: nn.Module) -> int:
    config: Any = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text_config.vocab_size)
