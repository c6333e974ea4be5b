"""Models that embed, and losses that compare the samples of a batch with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

NUM_SAMPLES, VOCABULARY, WIDTH = 10, 30, 8


class Encoder(nn.Module):
    """Maps token ids to one vector of length 1."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))  # belongs to the loss, not to the embedding

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.normalize(self.body(self.embedding(ids)).mean(1), dim=-1)


class Towers(nn.Module):
    """Two encoders; the second has frozen layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.passage = Encoder(dropout), Encoder(dropout)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.passage.body.layers[0].requires_grad_(False)
        self.passage.embedding.requires_grad_(False)

    def forward(self, query: Tensor, passage: Tensor) -> Tensor:
        """Return all similarities, which are not rows of samples."""
        return self.query(query) @ self.passage(passage).T


class Dicts(nn.Module):
    """Returns its input fields together with its output, as in sentence-transformers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = Encoder(dropout)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["tokens"] = self.encoder.body(self.encoder.embedding(features["ids"]))
        features["embedding"] = features["tokens"].mean(1)
        return features


class Bert(nn.Module):
    """A transformers model whose output is pooled in the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        self.bert = BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **rates))
        self.scale = nn.Parameter(torch.tensor(2.0))


def in_batch(queries: Tensor, passages: Tensor, scale: Tensor) -> Tensor:
    scores = queries @ passages.T * scale.exp()
    targets = torch.arange(len(scores))
    of_queries = nn.functional.cross_entropy(scores, targets)
    return of_queries + nn.functional.cross_entropy(scores.T, targets)


def tied(model: Encoder, batch: dict[str, Tensor]) -> Tensor:
    return in_batch(model(batch["query"]), model(batch["passage"]), model.scale)


def two_towers(model: Towers, batch: dict[str, Tensor]) -> Tensor:
    return in_batch(model.query(batch["query"]), model.passage(batch["passage"]), model.scale)


def of_similarities(model: Towers, batch: dict[str, Tensor]) -> Tensor:
    scores = model(**batch) * model.scale.exp()
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def of_dicts(model: Dicts, batch: dict[str, Tensor]) -> Tensor:
    one, other = (model({"ids": batch[name], "prompt": 3})["embedding"] for name in ("query", "passage"))
    return in_batch(one, other, model.scale)


def pooled(model: Bert, batch: dict[str, Tensor]) -> Tensor:
    def embedded(ids: Tensor) -> Tensor:
        output = model.bert(input_ids=ids, attention_mask=(ids > 2).long())
        return nn.functional.normalize(output.last_hidden_state[:, 0] + output.pooler_output, dim=-1)

    return in_batch(embedded(batch["query"]), embedded(batch["passage"]), model.scale)


def decorrelated(model: Encoder, batch: dict[str, Tensor]) -> Tensor:
    """Compute statistics over the batch, as Barlow Twins and VICReg do."""
    one, other = (nn.functional.layer_norm(model(batch[name]).T, (NUM_SAMPLES,)) for name in ("query", "passage"))
    return (one @ other.T / NUM_SAMPLES - torch.eye(WIDTH)).square().sum() * model.scale


def triplets(model: Encoder, batch: dict[str, Tensor]) -> Tensor:
    """Use the hardest negative of the batch; both sides are embedded in one call."""
    one, other = model(torch.cat((batch["query"], batch["passage"][:, :5]))).chunk(2)
    distances = torch.cdist(one, other)
    hardest = (distances + 9 * torch.eye(len(one))).amin(1)
    return (distances.diagonal() - hardest + model.scale).relu().mean()


class Case(NamedTuple):
    build: Callable[..., nn.Module]
    loss: Callable[[Any, dict[str, Tensor]], Tensor]


CASES = {
    "one encoder, two calls": Case(Encoder, tied),
    "two towers": Case(Towers, two_towers),
    "similarities": Case(Towers, of_similarities),
    "dicts": Case(Dicts, of_dicts),
    "transformers": Case(Bert, pooled),
    "statistics": Case(Encoder, decorrelated),
    "triplets": Case(Encoder, triplets),
}


def batches(num_steps: int, num_samples: int = NUM_SAMPLES, length: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    lengths = {"query": length, "passage": length + 2}
    return [
        {name: torch.randint(VOCABULARY, (num_samples, one), generator=generator) for name, one in lengths.items()}
        for _ in range(num_steps)
    ]


def fresh(case: Case, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return case.build(dropout=dropout).train()
