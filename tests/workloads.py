"""Small real trainings for the numerics tests, and the plain PyTorch loop they are compared with.

Each workload has features that make recovery difficult: dropout (random numbers), different numbers of labels per
sample (weights), recurrent state, BatchNorm (buffers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NUM_SAMPLES, BATCH_SIZE, LENGTH, VOCABULARY = 32, 8, 12, 50


@dataclass(frozen=True)
class Case:
    """A model builder, its data (all samples as one batch), and the units over which its loss averages."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], dict[str, Tensor]]
    units: str
    has_batch_norm: bool = False

    def fresh(self, learning_rate: float = 1e-2) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and AdamW, always with the same weights and the same random state."""
        torch.manual_seed(0)
        model = self.build().train()
        torch.manual_seed(1)
        return model, torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def batches(self) -> list[dict[str, Tensor]]:
        """Return the epoch in order, in batches of 8."""
        data = self.data()
        return [{k: v[i : i + BATCH_SIZE] for k, v in data.items()} for i in range(0, NUM_SAMPLES, BATCH_SIZE)]


def gpt2(dropout: float = 0.1) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 2,
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, use_cache=False, loss_type="ForCausalLMLoss"))


def bert(dropout: float = 0.1) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": VOCABULARY,
    }
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(**sizes, **rates, max_position_embeddings=LENGTH, num_labels=3))


class Output:
    """The part of a Hugging Face model's output that a loss needs."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Lstm(nn.Module):
    """A two-layer LSTM language model with dropout between the layers."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.lstm(self.embedding(input_ids))[0])
        return Output(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


class Cnn(nn.Module):
    """A convolutional text classifier with BatchNorm and dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(
            nn.Conv1d(16, 16, 3),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv1d(16, 16, 3),
            nn.BatchNorm1d(16),
        )
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        hidden = self.layers(self.embedding(input_ids).transpose(1, 2)).amax(dim=2)
        return Output(nn.functional.cross_entropy(self.head(hidden), labels))


def text() -> dict[str, Tensor]:
    """Return token ids with a different number of ignored labels in each sample; one has no label."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    for sample in range(NUM_SAMPLES):
        labels[sample, LENGTH - sample % LENGTH :] = -100
    labels[3] = -100
    return {"input_ids": ids, "labels": labels}


def classes() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.sum(dim=1) % 3}


CASES = (
    Case("gpt2", gpt2, text, "next-tokens"),
    Case("bert", bert, classes, "samples"),
    Case("lstm", Lstm, text, "next-tokens"),
    Case("cnn", Cnn, classes, "samples", has_batch_norm=True),
)


def plain_loop(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cuts: list[int],
    clip_norm: float | None = 1.0,
) -> list[float]:
    """Train in plain PyTorch: step ``i`` accumulates over micro-batches of ``cuts[i]``; return the losses."""
    losses = []
    batches = case.batches()
    for step, cut in enumerate(cuts):
        batch = batches[step % len(batches)]
        optimizer.zero_grad()
        total_units = units_of(case, batch)
        loss_value = 0.0
        for start in range(0, BATCH_SIZE, cut):
            piece = {k: v[start : start + cut] for k, v in batch.items()}
            units = units_of(case, piece)
            if units == 0:
                continue
            loss = model(**piece).loss * (units / total_units)
            loss.backward()
            loss_value += loss.item()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss_value)
    return losses


def mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a model that maps `x` to `y`."""
    return (model(batch["x"]) - batch["y"]).square().mean()


def units_of(case: Case, batch: dict[str, Tensor]) -> int:
    if case.units == "samples":
        return len(batch["labels"])
    labels = batch["labels"] if case.units == "tokens" else batch["labels"][:, 1:]
    return int((labels != -100).sum())


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return everything that a training changes: parameters, buffers, optimizer states."""
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    return found


def largest_relative_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two tensors, relative to the tensor's largest value, or to 1e-3 if that is less.

    Some tensors contain only rounding errors (the bias of an attention's keys has a gradient of zero), which are no
    scale.
    """
    assert one.keys() == other.keys()
    worst = 0.0
    for name, tensor in one.items():
        scale = max(tensor.abs().max().item(), 1e-3)
        worst = max(worst, (tensor.double() - other[name].double()).abs().max().item() / scale)
    return worst
