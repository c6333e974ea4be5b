"""Textbook stateful truncated BPTT in plain PyTorch: the bitwise reference for streams."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class PlainLanguageModel(nn.Module):
    """The layers of `plimsoll.models.recurrent.model.RecurrentLanguageModel`, with equal names in the same order."""

    def __init__(
        self, architecture: str, vocab_size: int, size: int, num_layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[architecture]
        self.embedding = nn.Embedding(vocab_size, size)
        self.recurrent = layers(size, size, num_layers=num_layers, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(size, vocab_size)


def plain_streams(
    model: PlainLanguageModel,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    *,
    num_slots: int,
    length: int,
    num_steps: int,
    text_begins: frozenset[int] = frozenset(),
    cut: int | None = None,
) -> list[float]:
    """Train on stream slots of equal length, window by window, with a carried and detached state; return the losses.

    Args:
        model: in training mode.
        optimizer: of the model's parameters; gradients are clipped to a norm of 1.
        tokens: all tokens, concatenated.
        num_slots: samples of a batch.
        length: tokens of a window; all except the last are inputs.
        num_steps: number of steps.
        text_begins: tokens before which the state is set to zeros.
        cut: number of stream slots per pass, with accumulated gradients; None for all.
    """
    cut = cut or num_slots
    slot_tokens = (len(tokens) - 1) // num_slots
    losses, place, state = [], 0, [None] * num_slots
    for _ in range(num_steps):
        if place >= slot_tokens:  # the next epoch
            place, state = 0, [None] * num_slots
        end = min(place + length - 1, slot_tokens)
        begins = [slot * slot_tokens + place for slot in range(num_slots)]
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, num_slots, cut):
            slots = range(first, min(first + cut, num_slots))
            read = torch.stack([tokens[begins[slot] : begins[slot] + end - place] for slot in slots])
            following = torch.stack([tokens[begins[slot] + 1 : begins[slot] + 1 + end - place] for slot in slots])
            carried = None if state[first] is None else _joined([state[slot] for slot in slots])
            resets = [[begins[slot] + t in text_begins for t in range(end - place)] for slot in slots]
            hidden, carried = _read_on(model, read, carried, torch.tensor(resets))
            logits = model.head(model.dropout(hidden))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
            if cut < num_slots:
                loss = loss * (len(slots) / num_slots)
            loss.backward()
            total += loss.item()
            for number, slot in enumerate(slots):
                state[slot] = [part[:, number : number + 1].detach() for part in carried]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
        place = end
    return losses


def _joined(states: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts, dim=1) for parts in zip(*states, strict=True)]


def _read_on(
    model: PlainLanguageModel, read: Tensor, state: list[Tensor] | None, resets: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Run the layers over some tokens; a stream slot's state is set to zeros at the beginning of a text."""
    embedded, outputs = model.dropout(model.embedding(read)), []
    is_lstm = isinstance(model.recurrent, nn.LSTM)
    for begin, end in pairwise(sorted({0, read.shape[1], *resets.any(0).nonzero().flatten().tolist()})):
        if state is not None:
            state = [part.masked_fill(resets[:, begin][None, :, None], 0.0) for part in state]
        given = None if state is None else tuple(state) if is_lstm else state[0]
        output, after = model.recurrent(embedded[:, begin:end], given)
        state = list(after) if is_lstm else [after]
        outputs.append(output)
    # Concatenation changes the memory layout, and dropout masks are drawn in the order of the memory.
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state
