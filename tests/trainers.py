"""Hugging Face trainers that train 64 small texts, and the properties that two of them must share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.tally import Tally, in_a_check
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from plimsoll.step.failpoints import exhaust_memory

NUM_SAMPLES, BATCH_SAMPLES, LENGTH, NUM_WORDS = 64, 8, 16, 50


def language_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"))
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=NUM_WORDS, n_positions=LENGTH, **drops, **ids)
    )


def classifier(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=NUM_WORDS,
            num_labels=3,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )  # fmt: skip
    return BertForSequenceClassification(config)


def samples(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return texts of unequal length, for which a mean of micro-batch means would be another loss."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(NUM_SAMPLES):
        ids = torch.randint(0, NUM_WORDS, (LENGTH,), generator=generator)
        if isinstance(model, GPT2LMHeadModel):
            labels = ids.clone()
            labels[int(torch.randint(4, LENGTH, (1,), generator=generator)) :] = -100
        else:
            labels = torch.randint(0, 3, (), generator=generator)
        made.append({"input_ids": ids, "labels": labels})
    return made


def trainer_of(model: nn.Module, folder: Path, cls: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    data = samples(model)
    plain: dict[str, Any] = {
        "per_device_train_batch_size": BATCH_SAMPLES, "num_train_epochs": 1, "report_to": [], "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        # Adam would turn rounding errors of zero gradients into updates.
        "learning_rate": 0.1, "optim": "sgd",
    }  # fmt: skip
    return cls(model, TrainingArguments(str(folder), **plain | arguments), train_dataset=data, eval_dataset=data[:10])


class MeanLoss(Trainer):
    """A common kind of trainer, which takes the mean over the tokens of each batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, labels)
        return (loss, outputs) if return_outputs else loss


@contextmanager
def short_of_memory(model: nn.Module, passes: Sequence[int], seen: Counter[tuple[int, ...]]) -> Iterator[None]:
    """Make memory run out in the given forward passes of training, and count the samples of the others."""
    num_passes = Tally()

    def before(module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or in_a_check():
            return
        if num_passes.next() in passes:
            exhaust_memory()
        seen.update(tuple(row) for row in options["input_ids"].tolist())

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def losses_of(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def assert_alike(one: Trainer, other: Trainer) -> None:
    assert one.state.global_step == other.state.global_step
    torch.testing.assert_close(losses_of(one), losses_of(other), atol=1e-5, rtol=0)
    assert one.model is not None
    assert other.model is not None
    expected = other.model.state_dict()
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


def assert_unwrapped(trainer: Trainer) -> None:
    wrapped = {"training_step", "compute_loss", "prediction_step", "log"}
    assert not wrapped & set(vars(trainer))
    assert "backward" not in vars(trainer.accelerator)
    assert not getattr(trainer.optimizer.step, "__qualname__", "").startswith("_Training")  # type: ignore[union-attr]
