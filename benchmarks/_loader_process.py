"""A process for `data_loader.py`: one epoch of shuffled reads, or a training that is killed and resumed.

python benchmarks/_loader_process.py read STORE WORKERS TEXT CACHE
python benchmarks/_loader_process.py consume JOURNAL WORKERS BATCHES
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.batches.batching import Buckets
from plimsoll.data.batches.loader import Loader

BATCH_SIZE = 1024
CONSUMED = Buckets(max_tokens=300, pool_samples=100)


# -- an epoch of reads -------------------------------------------------------------------------------------------------


class Lines:
    """Lines by number, from a list, a Hugging Face dataset or a corpus."""

    def __init__(self, lines: Any) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)


class ListOfLines(Lines):
    def __getitem__(self, number: int) -> str:
        return self.lines[number]


class HuggingFaceLines(Lines):
    def __getitems__(self, numbers: list[int]) -> list[str]:
        return self.lines[numbers]["text"]


class CorpusLines(Lines):
    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        return {"characters": characters(self.lines.texts(ids))}


def characters(lines: list[str]) -> torch.Tensor:
    """Collate a batch to the length of each line: few bytes, so that only reading is measured."""
    return torch.tensor([len(line) for line in lines], dtype=torch.int32)


def read(store: str, num_workers: int, text: Path, cache: Path) -> None:
    """Read every line once, and print a line at the start and the end for the process that watches the memory."""
    batches = BATCHES[store](text, cache, num_workers)
    print("begin", flush=True)
    started_seconds, num_lines, num_characters = time.perf_counter(), 0, 0
    for batch in batches:
        num_lines, num_characters = num_lines + len(batch), num_characters + int(batch.sum())
    seconds = time.perf_counter() - started_seconds
    print(json.dumps({"lines": num_lines, "characters": num_characters, "seconds": seconds}), flush=True)


def torch_batches(lines: Lines, num_workers: int) -> Any:
    return torch.utils.data.DataLoader(lines, BATCH_SIZE, shuffle=True, num_workers=num_workers, collate_fn=characters)


def list_batches(text: Path, cache: Path, num_workers: int) -> Any:
    with text.open(encoding="utf-8", newline="\n") as file:
        return torch_batches(ListOfLines([line.rstrip("\n") for line in file]), num_workers)


def hugging_face_batches(text: Path, cache: Path, num_workers: int) -> Any:
    import datasets

    datasets.disable_progress_bars()
    lines = datasets.Dataset.from_text(str(text), cache_dir=str(cache / "datasets"), keep_in_memory=False)
    return torch_batches(HuggingFaceLines(lines), num_workers)


def plimsoll_batches(text: Path, cache: Path, num_workers: int) -> Any:
    from plimsoll.data.formats import Reading
    from plimsoll.data.text.index import open_corpus

    corpus = open_corpus((str(text),), Reading(unit="line"), cache / "plimsoll")
    return (fields["characters"] for fields in Loader(CorpusLines(corpus), BATCH_SIZE, workers=num_workers))


BATCHES = {"list of str": list_batches, "HF datasets": hugging_face_batches, "plimsoll": plimsoll_batches}


# -- a training that is killed -----------------------------------------------------------------------------------------


class Numbers:
    """A data set whose samples are their indices."""

    def __len__(self) -> int:
        return 300

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        return {"ids": torch.from_numpy(ids.copy())}

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids % 40 + 1


def consume(journal: Path, num_workers: int, num_batches: int) -> None:
    """Consume batches until the journal has ``num_batches`` lines, each with a batch and the loader's next state."""
    loader = Loader(Numbers(), CONSUMED, 1, workers=num_workers, on_event=lambda text: None)
    lines = whole_lines(journal)
    if lines:
        loader.load_state_dict(json.loads(lines[-1])["state"])
    print("begin", flush=True)
    with journal.open("r+b") as file:
        file.truncate(sum(len(line) + 1 for line in lines))
        file.seek(0, os.SEEK_END)
        for _ in range(num_batches - len(lines)):
            ids = loader.peek().fields["ids"].tolist()
            loader.advance()
            os.write(file.fileno(), json.dumps({"ids": ids, "state": loader.state_dict()}).encode() + b"\n")
    loader.close()


def whole_lines(journal: Path) -> list[bytes]:
    """Return the complete lines of a journal; a partial last line is left out."""
    return journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []


def main() -> None:
    warnings.simplefilter("ignore", UserWarning)  # torch warns that there are more workers than cores
    mode, *arguments = sys.argv[1:]
    if mode == "read":
        store, num_workers, text, cache = arguments
        read(store, int(num_workers), Path(text), Path(cache))
    else:
        journal, num_workers, num_batches = arguments
        consume(Path(journal), int(num_workers), int(num_batches))


if __name__ == "__main__":
    main()
