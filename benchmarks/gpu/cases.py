"""The trainings that are recorded on a GPU and predicted without one: models, batches, and a common loop.

Both sides run `train`, so that they cannot diverge: `record` on a real device, `compare` on fake tensors. Needs only
torch and transformers. Batches are counted instead of random, so that a trace knows their values.

Each case differs from the base of its model in one property; a few cases at the end of `all_cases` combine several.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

NUM_STEPS = 4
CHUNK_TOKENS = 512
LABELS = 5
RECURRENT = ("lstm-lm", "gru-cls")
JOB_MODEL, JOB_BATCH_SIZE, JOB_LENGTH, JOB_VOCABULARY = "gpt2-job", 64, 512, 8000

Fields = dict[str, Tensor]
Note = Callable[[int, str], None]
"""Called as ``(step, phase)`` at the end of a phase; steps count from 1, and 0 is before the first."""


@dataclass(frozen=True)
class Case:
    """One training; ``attention`` is a kernel to allow, "eager" (the library's code) or "default"."""

    model: str
    batch_size: int  # samples per optimizer step, of all micro-batches together
    length: int  # tokens per sample
    precision: Literal["fp32", "bf16", "fp16", "bf16-weights"] = "fp32"
    optimizer: Literal["adamw", "adamw-fused", "adamw-loop", "sgd", "sgd-momentum"] = "adamw"
    checkpointing: bool = False
    accumulation: int = 1
    attention: Literal["default", "eager", "math", "efficient", "flash", "cudnn"] = "default"
    loss: Literal["model", "chunked", "linear-ce"] = "model"
    padded: bool = False
    clipped: bool = False
    layers: int | None = None
    tiny: bool = False  # minimal sizes, for tests

    @property
    def id(self) -> str:
        """The name, with all properties that differ from the default."""
        parts = [self.model, f"{self.batch_size}x{self.length}", self.precision, self.optimizer]
        parts += ["checkpointing"] * self.checkpointing + [f"accumulate{self.accumulation}"] * (self.accumulation > 1)
        parts += [self.attention] * (self.attention != "default") + [self.loss] * (self.loss != "model")
        parts += ["padded"] * self.padded + ["clipped"] * self.clipped + ["tiny"] * self.tiny
        return "-".join(parts + [f"{self.layers}layers"] * (self.layers is not None))

    def shrunk(self) -> Case:
        """Return the same case with small sizes."""
        layers = None if self.layers is None else 2
        return replace(self, batch_size=2 * self.accumulation, length=16, layers=layers, tiny=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Case:
        """Return a recorded case; fields that it lacks get defaults."""
        return cls(**fields)


# -- the models --------------------------------------------------------------------------------------------------------


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM and linear layer; all samples of a batch have one length."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(hidden, vocabulary)

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        output: Tensor = self.lstm(self.embedding(input_ids))[0]
        return output

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden_states(input_ids))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


class GruClassifier(nn.Module):
    """Embedding, bidirectional GRU over packed sequences, and linear layer."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, hidden, layers, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(2 * hidden, LABELS)

    def forward(self, input_ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(input_ids), lengths, batch_first=True, enforce_sorted=False)
        last = self.gru(packed)[1][-2:].transpose(0, 1).flatten(1)
        return nn.functional.cross_entropy(self.head(last).float(), labels)


def _gpt2(case: Case, attention: str) -> nn.Module:
    width, heads, layers = (32, 2, 2) if case.tiny else (768, 12, case.layers or 4)
    config = transformers.GPT2Config(
        vocab_size=vocabulary_of(case), n_positions=1024, n_embd=width, n_layer=layers, n_head=heads
    )
    config._attn_implementation = attention
    return transformers.GPT2LMHeadModel(config)


def _gpt2_of_job(case: Case, attention: str) -> nn.Module:
    width, heads, layers = (32, 2, 2) if case.tiny else (768, 12, case.layers or 12)
    config = transformers.GPT2Config(
        vocab_size=vocabulary_of(case), n_positions=JOB_LENGTH, n_embd=width, n_layer=layers, n_head=heads
    )
    config._attn_implementation = attention
    return transformers.GPT2LMHeadModel(config)


def _bert(case: Case, attention: str) -> nn.Module:
    width, heads, layers = (32, 2, 2) if case.tiny else (768, 12, case.layers or 4)
    config = transformers.BertConfig(
        vocab_size=vocabulary_of(case), hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, num_labels=LABELS,
    )  # fmt: skip
    config._attn_implementation = attention
    is_lm = case.model == "bert-mlm"
    return (transformers.BertForMaskedLM if is_lm else transformers.BertForSequenceClassification)(config)


def _t5(case: Case, attention: str) -> nn.Module:
    width, heads, layers = (32, 2, 2) if case.tiny else (512, 8, case.layers or 3)
    config = transformers.T5Config(
        vocab_size=vocabulary_of(case), d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=layers,
        num_heads=heads, decoder_start_token_id=0,
    )  # fmt: skip
    config._attn_implementation = attention
    return transformers.T5ForConditionalGeneration(config)


def _llama(case: Case, attention: str) -> nn.Module:
    width, heads, layers = (32, 2, 2) if case.tiny else (1024, 16, case.layers or 4)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary_of(case), hidden_size=width, intermediate_size=11 * width // 4,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
    )  # fmt: skip
    config._attn_implementation = attention
    return transformers.LlamaForCausalLM(config)


def _lstm(case: Case, attention: str) -> nn.Module:
    width, hidden = (16, 24) if case.tiny else (512, 1024)
    return LstmLanguageModel(vocabulary_of(case), width, hidden, case.layers or 2)


def _gru(case: Case, attention: str) -> nn.Module:
    width, hidden = (16, 24) if case.tiny else (300, 512)
    return GruClassifier(vocabulary_of(case), width, hidden, case.layers or 2)


_BUILDERS: dict[str, tuple[int, Callable[[Case, str], nn.Module]]] = {
    "gpt2": (50257, _gpt2),
    JOB_MODEL: (JOB_VOCABULARY, _gpt2_of_job),
    "bert-mlm": (30522, _bert),
    "bert-cls": (30522, _bert),
    "t5": (32128, _t5),
    "llama": (32000, _llama),
    "lstm-lm": (33278, _lstm),
    "gru-cls": (30000, _gru),
}


def vocabulary_of(case: Case) -> int:
    return 101 if case.tiny else _BUILDERS[case.model][0]


def weights_key(case: Case) -> tuple[object, ...]:
    """Return a key; cases with the same key may train copies of one model."""
    return case.model, case.attention == "eager", case.layers, case.tiny


def build(case: Case) -> nn.Module:
    """Build the model in host memory and fp32."""
    torch.manual_seed(0)
    return _BUILDERS[case.model][1](case, "eager" if case.attention == "eager" else "sdpa")


# -- the batches -------------------------------------------------------------------------------------------------------


def make_batch(case: Case, step: int) -> Fields:
    """Return one micro-batch in host memory; every step has other tokens and the same lengths."""
    num_samples, vocabulary = case.batch_size // case.accumulation, vocabulary_of(case)
    ids = (torch.arange(num_samples * case.length).view(num_samples, case.length) * 7919 + step) % (vocabulary - 2) + 1
    # The first sample is as long as the batch; the last one has a quarter of that.
    lengths = case.length - torch.arange(num_samples) * (3 * case.length // 4) // max(num_samples - 1, 1)
    if case.model == "gru-cls":
        return {"input_ids": ids, "lengths": lengths, "labels": torch.arange(num_samples) % LABELS}
    labels = torch.arange(num_samples) % LABELS if case.model == "bert-cls" else ids.clone()
    if case.model == "lstm-lm":
        return {"input_ids": ids, "labels": labels}
    is_token = torch.arange(case.length) < (lengths.view(-1, 1) if case.padded else case.length)
    mask = is_token.expand(num_samples, case.length).to(torch.int64)
    if case.padded and case.model != "bert-cls":
        labels = labels * mask - 100 * (1 - mask)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# -- the loop ----------------------------------------------------------------------------------------------------------


def train(case: Case, model: nn.Module, device: str, note: Note = lambda step, phase: None) -> None:
    """Move a model to the device and train it for `NUM_STEPS` steps in plain PyTorch.

    Args:
        case: the training.
        model: the result of `build`, or a copy; its weights are changed.
        device: "cuda:0" or "cpu".
        note: called at the end of each phase of a step.
    """
    device_type = device.partition(":")[0]
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore
    model.to(device, **({"dtype": torch.bfloat16} if case.precision == "bf16-weights" else {}))
    optimizer = make_optimizer(case, model)
    scaler = torch.amp.GradScaler(device_type, init_scale=1024.0, enabled=case.precision == "fp16")
    note(0, "model")
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        for _ in range(case.accumulation):
            batch = _moved(make_batch(case, step), device)
            with _autocast(case, device_type), _attention(case):
                loss = compute_loss(case, model, batch) / case.accumulation
            note(step, "forward")
            with _attention(case):  # a checkpointed forward is recomputed with the same kernel
                scaler.scale(loss).backward()
            note(step, "backward")
        if case.clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        note(step, "optimizer")


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Create the usual optimizer; "adamw" and SGD choose their kernels themselves (`foreach` on CUDA)."""
    if case.optimizer.startswith("sgd"):
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if case.optimizer == "sgd-momentum" else 0.0)
    options = {"adamw": {}, "adamw-fused": {"fused": True}, "adamw-loop": {"foreach": False}}[case.optimizer]
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def compute_loss(case: Case, model: Any, batch: Fields) -> Tensor:
    """Compute the loss of a micro-batch in the model, or from chunks of its hidden states."""
    if case.loss == "model":
        output = model(**batch)
        return output if isinstance(output, Tensor) else output.loss
    if case.model == "lstm-lm":
        hidden, head = model.hidden_states(batch["input_ids"]), model.head
    else:
        hidden = model.base_model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        head = model.lm_head
    hidden, labels = hidden[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    if case.loss == "linear-ce":
        return nn.functional.linear_cross_entropy(hidden, head.weight, labels)
    total = hidden.new_zeros((), dtype=torch.float32)
    for states, targets in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True):
        total = total + checkpoint(_sum_of_losses, states, head, targets, use_reentrant=False)
    return total / len(labels)


def _sum_of_losses(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(head(hidden).float(), labels, reduction="sum")


def _moved(batch: Fields, device: str) -> Fields:
    # `pack_padded_sequence` needs the lengths on the host.
    return {name: tensor if name == "lengths" else tensor.to(device) for name, tensor in batch.items()}


def _autocast(case: Case, device_type: str) -> AbstractContextManager[Any]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype)


_KERNELS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def _attention(case: Case) -> AbstractContextManager[Any]:
    return sdpa_kernel(_KERNELS[case.attention]) if case.attention in _KERNELS else nullcontext()


# -- the matrix --------------------------------------------------------------------------------------------------------

_BASES = (
    Case("gpt2", 8, 256),
    Case("bert-mlm", 16, 128),
    Case("bert-cls", 32, 128),
    Case("t5", 8, 128),
    Case("llama", 4, 512),
    Case("lstm-lm", 32, 64),
    Case("gru-cls", 64, 200),
)
_SHAPES = {
    "gpt2": ((2, 256), (16, 256), (8, 100), (2, 1000)),
    "bert-mlm": ((4, 128), (32, 128), (16, 77), (4, 512)),
    "bert-cls": ((8, 128), (64, 128), (32, 512)),
    "t5": ((2, 128), (24, 128), (8, 512)),
    "llama": ((1, 512), (8, 512), (4, 200), (1, 2048)),
    "lstm-lm": ((8, 64), (64, 64), (32, 35), (16, 256)),
    "gru-cls": ((16, 200), (128, 200), (64, 50)),
}
_ATTENTIONS = ("eager", "math", "efficient")
_HALF_ATTENTIONS = ("math", "efficient", "flash", "cudnn")


@dataclass(frozen=True)
class Planned:
    """A case and its priority: lower numbers run first."""

    case: Case
    priority: int


def bases() -> tuple[Case, ...]:
    return _BASES


def by_hand() -> tuple[Case, ...]:
    """Return one job with usual manual settings of micro-batch and checkpointing; fast or small ones first."""
    job = Case(JOB_MODEL, JOB_BATCH_SIZE, JOB_LENGTH, precision="bf16", clipped=True)
    return tuple(
        replace(job, accumulation=JOB_BATCH_SIZE // samples, checkpointing=checkpointing)
        for samples in (16, 32, 64, 8, 4, 2, 1)
        for checkpointing in (False, True)
    )


def all_cases() -> list[Planned]:
    """Return all cases in the order in which they run."""
    planned = [Planned(base, 0) for base in _BASES]
    for base in _BASES:
        planned += [Planned(case, priority) for case, priority in _one_factor(base)]
    planned += [Planned(case, 2) for case in _combinations()]
    return sorted(planned, key=lambda one: one.priority)


def _one_factor(base: Case) -> Iterator[tuple[Case, int]]:
    is_transformer = base.model not in RECURRENT
    yield replace(base, precision="bf16"), 1
    yield replace(base, precision="fp16"), 1
    yield replace(base, optimizer="sgd"), 1
    yield replace(base, optimizer="adamw-fused"), 2
    yield replace(base, accumulation=4), 1
    for batch_size, length in _SHAPES[base.model]:
        yield replace(base, batch_size=batch_size, length=length), 2
    if is_transformer:
        yield replace(base, checkpointing=True), 1
        yield replace(base, padded=True), 2
    if base.model in ("gpt2", "lstm-lm", "bert-mlm"):
        yield replace(base, optimizer="adamw-loop"), 2
        yield replace(base, clipped=True), 3
    if base.model in ("gpt2", "llama", "gru-cls"):
        yield replace(base, optimizer="sgd-momentum"), 3
    if base.model in ("gpt2", "llama", "lstm-lm"):
        yield replace(base, precision="bf16-weights"), 3
        yield replace(base, loss="chunked"), 2
        yield replace(base, loss="linear-ce"), 4
    if base.model in ("gpt2", "llama", "bert-mlm"):
        for attention in _ATTENTIONS:
            yield replace(base, attention=attention), 3  # type: ignore[arg-type]
        for attention in _HALF_ATTENTIONS:
            yield replace(base, precision="bf16", attention=attention), 3  # type: ignore[arg-type]


def _combinations() -> Iterator[Case]:
    gpt2, bert, _, t5, llama, lstm, gru = _BASES
    for base in (gpt2, bert, t5, llama):
        yield replace(base, precision="bf16", checkpointing=True, optimizer="adamw-fused", accumulation=4, clipped=True)
    yield replace(gpt2, precision="fp16", loss="chunked", optimizer="sgd", padded=True)
    yield replace(llama, precision="bf16", loss="chunked", checkpointing=True)
    yield replace(lstm, precision="fp16", optimizer="adamw-fused", accumulation=4, clipped=True)
    yield replace(gru, precision="bf16", layers=3, clipped=True)
    yield replace(gpt2, layers=12, batch_size=16)
    yield replace(bert, layers=12, precision="bf16", length=512)
