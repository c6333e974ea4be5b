"""Small models of each kind that can be compressed, with a tokenizer and texts for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.models.recurrent.model import build_recurrent

CORPUS = (
    "the ship may be loaded up to the line and never past it",
    "a line on the hull of a ship shows how deep she may be loaded",
    "load the machine up to the line, never past it",
    "the hull of the ship shows the line",
)
OTHER = ("quick brown foxes jump over lazy dogs", "zebras & 12 quails!")

_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
_LENGTH = {"max_position_embeddings": 64}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def tokenizer(kind: str = "BPE") -> Any:
    """Return a tokenizer of a kind, trained on the corpus and on other texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<end>", "<unk>", "[CLS]", "[SEP]"]
    options: dict[str, Any] = {"vocab_size": 400, "special_tokens": special, "show_progress": False}
    if kind == "BPE":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    elif kind == "WordPiece":
        backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.pre_tokenizer, trainer = pre_tokenizers.BertPreTokenizer(), trainers.WordPieceTrainer(**options)
    elif kind == "Unigram":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    else:
        backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
        backend.pre_tokenizer, trainer = pre_tokenizers.Whitespace(), trainers.WordLevelTrainer(**options)
    backend.train_from_iterator([*CORPUS, *OTHER] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>", unk_token="<unk>")


def _of_transformers(class_name: str, vocab_size: int, **fields: Any) -> nn.Module:
    import transformers

    model_class = getattr(transformers, class_name)
    model: nn.Module = model_class(model_class.config_class(vocab_size=vocab_size, **fields))
    return model


def _recurrent(vocab_size: int, **fields: Any) -> nn.Module:
    given = {"architecture": "lstm", "vocab_size": vocab_size, "embedding_size": 24, "hidden_size": 24, **fields}
    return build_recurrent(given)


MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "bert": lambda size: _of_transformers(
        "BertForSequenceClassification", size, **_SIZES, **_LENGTH, pad_token_id=0, num_labels=3
    ),
    "gpt2": lambda size: _of_transformers(
        "GPT2LMHeadModel", size, n_embd=32, n_layer=3, n_head=4, n_positions=64, **_ENDS
    ),
    "llama": lambda size: _of_transformers(
        "LlamaForCausalLM", size, num_key_value_heads=2, tie_word_embeddings=False, **_SIZES, **_LENGTH, **_ENDS
    ),
    "lstm-classifier": lambda size: _recurrent(size, num_labels=3, num_layers=2),
    "lstm-lm": lambda size: _recurrent(size),
}
"""The kinds on which every method is tested."""

MORE_MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "bert-masked": lambda size: _of_transformers("BertForMaskedLM", size, **_SIZES, **_LENGTH, pad_token_id=0),
    "roberta": lambda size: _of_transformers(
        "RobertaForSequenceClassification", size, **_SIZES, **_LENGTH, pad_token_id=1
    ),
    "t5": lambda size: _of_transformers("T5EncoderModel", size, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4),
    "t5-whole": lambda size: _of_transformers(
        "T5ForConditionalGeneration", size, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4
    ),
    "lstm-lm-tied": lambda size: _recurrent(size, tie_weights=True),
    "lstm-tagger": lambda size: _recurrent(size, num_labels=3, is_tagger=True),
}


def bundle(name: str, kind: str = "BPE") -> Bundle:
    """Return a model with seeded weights unlike a new model's, and its tokenizer."""
    own = tokenizer(kind)
    torch.manual_seed(0)
    model = (MODELS | MORE_MODELS)[name](len(own))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.05 * torch.randn_like(value))
    return Bundle(model.eval(), own)


def meta_bundle(name: str, kind: str = "BPE") -> Bundle:
    """Return the same on the meta device."""
    own = tokenizer(kind)
    with torch.device("meta"):
        return Bundle((MODELS | MORE_MODELS)[name](len(own)).eval(), own)


def ids_of(own: Any, text: str) -> Tensor:
    """Return the tokens of a text, (1, T)."""
    return torch.tensor([own(text)["input_ids"]])


def calibration(given: Bundle) -> Calibration:
    """Return batches of the corpus with labels for the model's task, and the counts of the tokens."""
    rows = [given.tokenizer(text)["input_ids"] for text in CORPUS]
    counts = np.bincount(np.concatenate(rows), minlength=len(given.tokenizer))

    def batches() -> Iterator[Mapping[str, Tensor]]:
        for number, row in enumerate(rows):
            ids_BT = torch.tensor([row, row[::-1]])
            labels = ids_BT if is_language_model(given.model) else torch.tensor([number % 3, (number + 1) % 3])
            yield {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "labels": labels}

    return Calibration(batches, counts)


def is_language_model(model: nn.Module) -> bool:
    """Return whether the labels are tokens."""
    if hasattr(model.config, "model_copy"):
        return model.config.num_labels is None
    return "Classification" not in type(model).__name__


def num_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights, each counted once."""
    return sum(value.numel() * value.element_size() for value in model.parameters())


def outputs(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Return the logits, or the hidden states of a model without logits."""
    with torch.no_grad():
        more = {"decoder_input_ids": ids_BT} if getattr(model.config, "is_encoder_decoder", False) else {}
        made = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), **more)
        return made[0] if getattr(made, "logits", None) is None else made.logits
