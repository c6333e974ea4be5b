"""Tokenizers of three kinds, trained on demand, with and without special tokens around a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

ROLES = {
    "word_piece": {
        "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]",
    },
    "byte_level": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "sentence_piece": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
}  # fmt: skip
TEMPLATES = {"word_piece": "[CLS] $A [SEP]", "byte_level": "<s> $A", "sentence_piece": "$A </s>"}


def byte_level(texts: Sequence[str], adds_space: bool = False) -> tokenizers.Tokenizer:
    """Train a tokenizer like GPT-2's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<pad>"]
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return backend


def word_piece(texts: Sequence[str], lowercase: bool = True) -> tokenizers.Tokenizer:
    """Train a tokenizer like uncased BERT's."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    return backend


def sentence_piece(texts: Sequence[str]) -> tokenizers.Tokenizer:
    """Train a tokenizer like T5's."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    backend.train_from_iterator(
        texts,
        trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    return backend


KINDS = {"word_piece": word_piece, "byte_level": byte_level, "sentence_piece": sentence_piece}


def with_template(backend: tokenizers.Tokenizer, single: str) -> tokenizers.Tokenizer:
    """Make the tokenizer put special tokens around a text, according to a template such as ``[CLS] $A [SEP]``, and
    return it.
    """
    names = [name for name in single.split() if not name.startswith("$")]
    special = [(name, backend.token_to_id(name)) for name in dict.fromkeys(names)]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return backend


def saved(folder: Path, backend: tokenizers.Tokenizer, kind: str, **settings: Any) -> Path:
    """Save a folder as users have it: its file contains truncation and padding settings for another purpose."""
    folder.mkdir(parents=True)
    backend.enable_truncation(7)
    backend.enable_padding()
    backend.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512} | ROLES[kind] | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder
