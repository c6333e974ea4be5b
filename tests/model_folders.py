"""Small model folders as users have them: weights, configuration and a tokenizer trained on a few words."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(90)]

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def tokenizer() -> Any:
    """Return a word tokenizer with [CLS] and [SEP], as in BERT."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **roles)


def model_folder(folder: Path, class_name: str = "GPT2LMHeadModel", **fields: Any) -> Path:
    """Write a transformers model with seeded weights, and its tokenizer."""
    import torch
    import transformers

    model_class = getattr(transformers, class_name)
    names = tokenizer()
    ends = {"bos_token_id": 2, "eos_token_id": 3} if class_name.endswith(("LMHeadModel", "ForCausalLM")) else {}
    torch.manual_seed(0)
    config = model_class.config_class(**SIZES | {"vocab_size": len(names)} | ends | fields)
    model_class(config).save_pretrained(folder)
    names.save_pretrained(folder)
    return folder


def some_texts(num_texts: int, most_words: int = 12, seed: int = 0) -> list[str]:
    """Return texts of 1 to ``most_words`` words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, most_words))) for _ in range(num_texts)]


def write_rows(path: Path, texts: list[str]) -> Path:
    """Write texts as JSON lines with ids."""
    records = ({"id": f"t{number}", "text": text} for number, text in enumerate(texts))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
