"""Recurrent taggers: LSTM, GRU and plain (tanh) RNN that give each token a label, from both sides if bidirectional.

Configured, called and saved as the models of `plimsoll.models.recurrent.model` are; dropout is where these have it.
Padding on the right changes nothing: where both directions are read, sequences are packed, so that the one from right
to left begins at the last token. On the CPU torch takes time for a packed sequence that grows with the square of its
length, but with `plimsoll.techniques.packed_stretches`. It does NOT cover labels that depend on their neighbours (a
CRF), and padding on the left.

Shapes: B samples, T tokens, H hidden size of all directions, L labels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from plimsoll.data.batch import IGNORED_LABEL
from plimsoll.models.adaptive import widened
from plimsoll.models.recurrent.model import RecurrentLabeller, RecurrentOutput, recurrent_config


class RecurrentTagger(RecurrentLabeller):
    """Gives each token one of L labels; its loss is the mean over the tokens that have a label."""

    @property
    def packs_sequences(self) -> bool:
        """Whether sequences are packed, which `plimsoll.techniques.packed_stretches` asks."""
        return self.config.bidirectional

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> RecurrentOutput:
        """Compute the logits (B, T, L) and the mean loss over the labels that are not -100.

        Args:
            input_ids: (B, T), padded on the right.
            attention_mask: (B, T), 1 for a token and 0 for padding, which then changes nothing; without it all are
                tokens. A sequence without tokens is read as one token of padding.
            labels: (B, T), from 0 to L - 1, or -100.
        """
        embedded = self.dropout(self.embedding(input_ids))
        if attention_mask is None or not self.config.bidirectional:  # from left to right no token sees the padding
            hidden_BTH, _ = self.recurrent(embedded)
        else:
            num_tokens = attention_mask.sum(dim=1).clamp(min=1).cpu()
            packed = pack_padded_sequence(embedded, num_tokens, batch_first=True, enforce_sorted=False)
            hidden, _ = self.recurrent(packed)
            hidden_BTH, _ = pad_packed_sequence(hidden, batch_first=True, total_length=input_ids.shape[1])
        logits_BTL = self.head(self.dropout(hidden_BTH))
        if labels is None:
            return RecurrentOutput(None, logits_BTL)
        logits = widened(logits_BTL.flatten(0, 1))
        loss = functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL)
        return RecurrentOutput(loss, logits_BTL)


def build_tagger(fields: dict[str, Any]) -> RecurrentTagger:
    """Build a tagger with new weights from the fields of a `RecurrentConfig`.

    Raises:
        JobError: if a field is unknown or has a wrong value.
    """
    return RecurrentTagger(recurrent_config(fields | {"is_tagger": True}))
