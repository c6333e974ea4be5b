"""Feeding lines of text to a training with several libraries; one process of `rivals_streaming.py`.

    python benchmarks/rivals/streams.py MODE STORE FOLDER FILE...

It runs in the library's environment. MODE is

- ``prepare``: write the library's files;
- ``epoch``: an epoch of shuffled batches;
- ``resume-first`` and ``resume-rest``: the epoch in two processes;
- ``kill``: a worker is killed in the middle.

The process prints ``begin`` after its imports, waits for a line, works, and prints a JSON line.

Each line of the files begins with its number. All stores get the same batch size, two workers, and the same `collate`.
It returns the numbers and all bytes of the batch as tensors, in the workers if the library has any.

The libraries are set up as documented:

- ``datasets``: ``load_dataset("text")``, which writes Arrow files that are mapped, in a ``DataLoader`` with
  ``shuffle=True``. Resumes with Accelerate's ``skip_first_batches``.
- ``datasets-streaming``: ``load_dataset("text", streaming=True)``, shuffled in a buffer of 10,000, in a ``DataLoader``.
  Its ``state_dict`` covers only this process and not a plain ``DataLoader``'s workers (torchdata's
  ``StatefulDataLoader`` does), so resuming is tried without workers.
- ``litdata``: ``optimize`` with two workers into chunks of 64 MB, ``StreamingDataset(shuffle=True)``,
  ``StreamingDataLoader`` and its ``state_dict``.
- ``mosaicml-streaming``: ``MDSWriter``, ``StreamingDataset(shuffle=True)``, ``StreamingDataLoader`` and its
  ``state_dict``. The library imports torchvision for image data sets. If that cannot be imported with this torch, an
  empty module replaces it.
- ``plimsoll``: ``open_corpus``, ``Loader``, its ``state_dict``.
- ``list of str``: all lines in memory, in a ``DataLoader``.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

BATCH_SIZE = 256
NUM_WORKERS = 2
BUFFER = 10_000
CHUNK = "64MB"
PATIENCE_SECONDS = 60
Batch = dict[str, torch.Tensor]


def collate(lines: list[Any]) -> Batch:
    texts = [line if isinstance(line, str) else line["text"] for line in lines]
    numbers = torch.tensor([int(text.split(" ", 1)[0]) for text in texts])
    return {"numbers": numbers, "bytes": torch.frombuffer(bytearray("\n".join(texts), "utf-8"), dtype=torch.uint8)}


def lines_of(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")


# -- stores ------------------------------------------------------------------------------------------------------------


class Store:
    """A library: preparation of the files, batches, and state; `batches` iterates over ``loader``."""

    imports: tuple[str, ...] = ()

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files, self.loader = folder, files, None

    def prepare(self) -> None:
        pass

    def open(self, num_workers: int = NUM_WORKERS) -> None:
        raise NotImplementedError

    def batches(self) -> Iterator[Batch]:
        return iter(self.loader)

    def state(self, num_batches: int) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    num_resuming_workers = NUM_WORKERS


class ListOfLines(Store):
    """All lines in memory."""

    imports = ("accelerate",)

    def open(self, num_workers: int = NUM_WORKERS) -> None:
        self.loader = shuffled([line for path in self.files for line in lines_of(path)], num_workers)

    def state(self, num_batches: int) -> Any:
        return num_batches

    def load(self, state: Any) -> None:
        from accelerate import skip_first_batches

        self.loader = skip_first_batches(self.loader, state)


def shuffled(lines: Any, num_workers: int) -> DataLoader:
    random = torch.Generator().manual_seed(0)
    return DataLoader(
        lines, BATCH_SIZE, shuffle=True, num_workers=num_workers, collate_fn=collate, generator=random
    )  # fmt: skip


class Datasets(ListOfLines):
    """Hugging Face datasets, mapped."""

    imports = ("datasets", "accelerate")

    def read(self, **options: Any) -> Any:
        import datasets

        datasets.disable_progress_bars()
        return datasets.load_dataset(
            "text", data_files=self.files, split="train", cache_dir=str(self.folder), **options
        )

    def prepare(self) -> None:
        self.read()

    def open(self, num_workers: int = NUM_WORKERS) -> None:
        self.loader = shuffled(self.read(), num_workers)


class StreamingDatasets(Datasets):
    """Hugging Face datasets, read directly from the files."""

    num_resuming_workers = 0

    def prepare(self) -> None:
        pass

    def open(self, num_workers: int = NUM_WORKERS) -> None:
        self.lines = self.read(streaming=True).shuffle(seed=0, buffer_size=BUFFER)
        self.loader = DataLoader(self.lines, BATCH_SIZE, num_workers=num_workers, collate_fn=collate)

    def state(self, num_batches: int) -> Any:
        return self.lines.state_dict()

    def load(self, state: Any) -> None:
        self.lines.load_state_dict(state)


class Litdata(Store):
    """Chunks written by litdata."""

    imports = ("litdata",)

    def prepare(self) -> None:
        from litdata import optimize

        optimize(
            fn=lines_of, inputs=self.files, output_dir=str(self.folder), chunk_bytes=CHUNK, num_workers=NUM_WORKERS
        )

    def open(self, num_workers: int = NUM_WORKERS) -> None:
        from litdata import StreamingDataLoader, StreamingDataset

        lines = StreamingDataset(str(self.folder), shuffle=True)
        self.loader = StreamingDataLoader(lines, batch_size=BATCH_SIZE, num_workers=num_workers, collate_fn=collate)


class Mosaic(Store):
    """Shards of mosaicml-streaming."""

    imports = ("streaming",)

    def prepare(self) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=str(self.folder), columns={"text": "str"}) as out:
            for path in self.files:
                for line in lines_of(path):
                    out.write({"text": line})

    def open(self, num_workers: int = NUM_WORKERS) -> None:
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        lines = StreamingDataset(local=str(self.folder), shuffle=True, batch_size=BATCH_SIZE)
        self.loader = StreamingDataLoader(lines, batch_size=BATCH_SIZE, num_workers=num_workers, collate_fn=collate)


class Plimsoll(Store):
    """The original files, with an index of their lines."""

    imports = ("plimsoll.data.text.index", "plimsoll.data.batches.loader")

    def prepare(self) -> None:
        from plimsoll.data.formats import Reading
        from plimsoll.data.text.index import open_corpus

        self.corpus = open_corpus(tuple(self.files), Reading(unit="line"), self.folder)

    def open(self, num_workers: int = NUM_WORKERS) -> None:
        from plimsoll.data.batches.loader import Loader

        self.prepare()
        self.loader = Loader(self, BATCH_SIZE, seed=0, workers=num_workers)

    def __len__(self) -> int:
        return len(self.corpus)

    def batch(self, ids: Any, epoch: int = 0) -> Batch:
        return collate(self.corpus.texts(ids))


STORES: dict[str, type[Store]] = {
    "list of str": ListOfLines, "datasets": Datasets, "datasets-streaming": StreamingDatasets, "litdata": Litdata,
    "mosaicml-streaming": Mosaic, "plimsoll": Plimsoll,
}  # fmt: skip


def stand_in_for_torchvision() -> None:
    """Replace a torchvision that cannot be imported with this torch by empty modules."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("torchvision", "torchvision.datasets", "torchvision.transforms",
                     "torchvision.transforms.functional"):  # fmt: skip
            module = sys.modules[name] = ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.VisionDataset = module.to_tensor = object


# -- modes -------------------------------------------------------------------------------------------------------------


class Seen:
    """Counts the occurrences of each line."""

    def __init__(self, num_lines: int) -> None:
        self.counts, self.num_batches = np.zeros(num_lines, np.int32), 0

    def take(self, batch: Batch) -> None:
        np.add.at(self.counts, batch["numbers"].numpy(), 1)
        self.num_batches += 1

    def figures(self) -> dict[str, int]:
        repeated = int(np.clip(self.counts - 1, 0, None).sum())
        return {
            "lines": int(self.counts.sum()), "batches": self.num_batches, "missing": int((self.counts == 0).sum()),
            "repeated": repeated,
        }  # fmt: skip


def epoch(store: Store, seen: Seen) -> dict[str, Any]:
    begun = time.perf_counter()
    store.open()
    first_seconds = 0.0
    for batch in store.batches():
        first_seconds = first_seconds or time.perf_counter() - begun
        seen.take(batch)
    return {"first_seconds": first_seconds, "seconds": time.perf_counter() - begun}


def resume_first(store: Store, seen: Seen) -> dict[str, Any]:
    """Read 40 % of the epoch, take the state, and read a few batches that are lost, as in a crash."""
    store.open(store.num_resuming_workers)
    num_batches = int(0.4 * len(seen.counts) / BATCH_SIZE)
    for batch in store.batches():
        seen.take(batch)
        if seen.num_batches == num_batches:
            break
    state = store.state(num_batches)
    (store.folder.parent / f"{store.folder.name}.state").write_bytes(pickle.dumps((state, seen.counts)))
    return {"state_bytes": len(pickle.dumps(state))}


def resume_rest(store: Store, seen: Seen) -> dict[str, Any]:
    state, seen.counts = pickle.loads((store.folder.parent / f"{store.folder.name}.state").read_bytes())
    begun = time.perf_counter()
    store.open(store.num_resuming_workers)
    store.load(state)
    first_seconds = 0.0
    for batch in store.batches():
        first_seconds = first_seconds or time.perf_counter() - begun
        seen.take(batch)
    return {"first_seconds": first_seconds, "resuming_workers": store.num_resuming_workers}


def kill(store: Store, seen: Seen) -> dict[str, Any]:
    """Kill one of the workers after 10 % of the epoch."""
    store.open()
    when, outcome = int(0.1 * len(seen.counts) / BATCH_SIZE), "goes on to the end"
    signal.signal(signal.SIGALRM, raise_timeout)
    try:
        for batch in store.batches():
            seen.take(batch)
            signal.alarm(PATIENCE_SECONDS)
            if seen.num_batches == when:
                os.kill(workers()[0], signal.SIGKILL)
    except TimeoutError:
        outcome = f"waits, {PATIENCE_SECONDS} s and more"
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        outcome = f"raises {type(error).__name__}: {error}".splitlines()[0]
    signal.alarm(0)
    return {"outcome": outcome}


def raise_timeout(*_: object) -> None:
    raise TimeoutError


def workers() -> list[int]:
    """Return the processes that this one has started for reading."""
    numbers = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    commands = {int(number): Path(f"/proc/{number}/cmdline").read_bytes() for number in numbers}
    return [number for number, command in commands.items() if b"tracker" not in command]


MODES = {"epoch": epoch, "resume-first": resume_first, "resume-rest": resume_rest, "kill": kill}


def main() -> None:
    mode, name, folder, num_lines, *files = sys.argv[1:]
    store = STORES[name](Path(folder), files)
    if name == "mosaicml-streaming":
        stand_in_for_torchvision()
    for module in store.imports:
        __import__(module)
    seen = Seen(int(num_lines))
    torch.zeros(1)
    print("begin", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    if mode == "prepare":
        store.prepare()
        found = {"seconds": time.perf_counter() - begun}
    else:
        found = MODES[mode](store, seen) | seen.figures()
    print(json.dumps(found), flush=True)
    os._exit(0)  # a library may wait for a killed worker at exit


if __name__ == "__main__":
    main()
