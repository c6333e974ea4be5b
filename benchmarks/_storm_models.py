"""The smallest models for `storm.py`: ids `(samples, 6)` to three numbers per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from _storm_run import Kind, Training

VOCABULARY, WIDTH, CLASSES = 50, 8, 3


class Net(nn.Module):
    """The mean of the embeddings and a linear layer; other nets add their state to it."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.b = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.e(x).mean(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.features(x))


def classified(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def adamw(parameters: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 0.01, **settings})


def trained(
    model: nn.Module, loss: Any = classified, optimizer: Any = adamw, kept: Any = None, **options: Any
) -> Training:
    """Build a training of the model's trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Training(model, optimizer(parameters), loss, options=options, kept=kept or {})


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.e, self.r = nn.Embedding(VOCABULARY, WIDTH), kind(WIDTH, WIDTH, batch_first=True, **options)
        self.b = nn.Linear(self.r.hidden_size * (1 + self.r.bidirectional), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.r(self.e(x))[0].mean(1))


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.e = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)
        self.layers, self.b = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.layers(self.e(x)).mean(1))


class Tied(nn.Module):
    """A language model whose output layer shares the input embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.b = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.b.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.e(x).tanh())[:, -1, :CLASSES]


def mlp(*between: nn.Module) -> nn.Module:
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    return nn.Sequential(embedding, nn.Flatten(), nn.Linear(6 * WIDTH, WIDTH), *between, nn.Linear(WIDTH, CLASSES))


def convolution() -> nn.Module:
    turned = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Conv1d(6, WIDTH, 3, padding=1), nn.GELU(), nn.Flatten())
    return nn.Sequential(turned, nn.GroupNorm(2, 6 * WIDTH), nn.Linear(6 * WIDTH, CLASSES))


def gpt2(dropout: float = 0.0, vocabulary: int = VOCABULARY) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # the import takes seconds

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"vocab_size": vocabulary, "n_positions": 8, "n_embd": WIDTH, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, use_cache=False))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8, "hidden_size": WIDTH, "num_hidden_layers": 1}
    more = {"num_attention_heads": 2, "intermediate_size": 2 * WIDTH, "num_labels": CLASSES}
    return BertForSequenceClassification(BertConfig(**sizes, **more))


def of_language(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch["x"], labels=batch["x"]).loss


def of_texts(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch["x"], labels=batch["y"]).loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "mean of vectors": (Net, classified, {}),
    "MLP with dropout": (partial(mlp, nn.ReLU(), nn.Dropout(0.2)), classified, {}),
    "BatchNorm": (lambda: mlp(nn.BatchNorm1d(WIDTH)), classified, {}),
    "BatchNorm, cut all the same": (lambda: mlp(nn.BatchNorm1d(WIDTH)), classified, {"recut_batch_norm": True}),
    "BatchNorm, cumulative": (lambda: mlp(nn.BatchNorm1d(WIDTH, momentum=None)), classified, {}),
    "InstanceNorm with statistics": (
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.InstanceNorm1d(6, track_running_stats=True), nn.Flatten(),
                              nn.Linear(36, CLASSES)), classified, {},
    ),
    "LayerNorm": (lambda: mlp(nn.LayerNorm(WIDTH), nn.GELU()), classified, {}),
    "convolution": (convolution, classified, {}),
    "GRU": (partial(Recurrent, nn.GRU), classified, {}),
    "LSTM of two layers, dropout": (partial(Recurrent, nn.LSTM, num_layers=2, dropout=0.2), classified, {}),
    "bidirectional RNN": (partial(Recurrent, nn.RNN, bidirectional=True), classified, {}),
    "transformer": (Encoder, classified, {}),
    "transformer with dropout": (partial(Encoder, 0.1), classified, {}),
    "tied embeddings": (Tied, classified, {}),
    "GPT-2": (gpt2, of_language, {}),
    "GPT-2 with dropout": (partial(gpt2, 0.1), of_language, {}),
    "BERT": (bert, of_texts, {}),
}  # fmt: skip


def kinds() -> list[Kind]:
    """Return each model with AdamW in fp32 and bf16, and with momentum SGD and clipped gradients."""

    def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    found = []
    for name, (make, loss, options) in MODELS.items():
        found.append(Kind("models", name, partial(_of, make, loss, **options)))
        clipped = partial(_of, make, loss, optimizer=sgd, clip_norm=0.1, **options)
        found.append(Kind("models", f"{name}, SGD, clipped", clipped))
    for name in ("MLP with dropout", "BatchNorm", "transformer", "GPT-2"):
        make, loss, options = MODELS[name]
        found.append(Kind("models", f"{name}, bf16", partial(_of, make, loss, precision="bf16", **options)))
    return found


def _of(make: Callable[[], nn.Module], *arguments: Any, **options: Any) -> Training:
    return trained(make(), *arguments, **options)
