"""Cost of feeding: memory of workers over an epoch, padding, training speed, and batches lost when processes are
killed.

    PYTHONPATH=src python benchmarks/data_loader.py [--lines 10000000] [--only memory,padding,training,kills]

Memory is summed over the process and its workers, twice a second: private memory (RssAnon), and PSS, which divides
shared pages among processes. The text is generated (Zipf's law over 50,000 words, lognormal lengths) unless ``--data``
names a file of lines. The list of str and the Hugging Face dataset (needs `datasets`) are read by a DataLoader with
``shuffle=True`` and the same number of workers.

Padding is counted on lognormal lengths that resemble lines of text, in tokens: 27 on average, 123 or more for one in
100, at most 512.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from _loader_process import CONSUMED, Numbers, whole_lines
from _results import add_out, fenced, file_result, keep_printed, mib, table
from plimsoll.data.batches.batching import Batches, Buckets, Cursor, batches_of
from plimsoll.data.batches.loader import Loader
from plimsoll.data.samples.ragged import pad_multiple_for

MIB = 2**20
PROCESS = Path(__file__).with_name("_loader_process.py")
STORES = ("list of str", "HF datasets", "plimsoll")
WORKERS = (0, 2, 4)
SECTIONS = ("memory", "padding", "training", "kills")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000_000, help="lines of the generated text")
    parser.add_argument("--data", type=Path, help="a text file to read instead")
    parser.add_argument("--stores", default=",".join(STORES), help="stores whose memory is measured")
    parser.add_argument("--lengths", type=int, default=10_000_000, help="number of samples in the padding count")
    parser.add_argument("--batches", type=int, default=60, help="batches of 64 samples in the training")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the training")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", default=",".join(SECTIONS))
    add_out(parser)
    options = parser.parse_args()
    printed = keep_printed()
    sections = options.only.split(",")
    results: dict[str, Any] = {}
    if "memory" in sections:
        results["memory"] = memory(options.lines, options.data, options.stores.split(","))
    if "padding" in sections:
        results["padding"] = padding(options.lengths)
    if "training" in sections:
        results["training"] = training(64 * options.batches, options.rounds)
    if "kills" in sections:
        results["kills"] = kills(options.kills)
    packages = ("numpy", "torch", "transformers", "datasets")
    file_result(options.out, "data-loader", "The loader", fenced(printed.text), part_of(results), packages=packages)
    print(json.dumps(results))


def part_of(results: dict[str, Any]) -> str:
    """Return the part that pages show."""
    parts = []
    if "memory" in results:
        names = {"list of str": "list of str", "HF datasets": "Hugging Face datasets", "plimsoll": "Plimsoll"}
        rows = {names[store]: [row for row in results["memory"] if row["store"] == store] for store in names}
        header = ["private memory of all processes over a shuffled epoch", *(f"{number} workers" for number in WORKERS)]
        parts.append(
            table(header, [[name, *(mib(row["private"]) for row in found)] for name, found in rows.items() if found])
        )
    said = []
    if "kills" in results:
        found = results["kills"]
        said.append(
            f"{found['training'] + found['worker']} SIGKILLs of workers and trainings: of {found['batches']:,} batches "
            f"{found['wrong']} were lost, repeated or in another order."
        )
    if "padding" in results:
        found = results["padding"]
        own = next(name for name in found if name.startswith("buckets of 64, to") and name != "buckets of 64, to 8")
        said.append(
            f"Padding of short lines in batches of 64: {found['shuffled, 64']['padding']:.0%} shuffled, "
            f"{found[own]['padding']:.0%} in buckets."
        )
    if "training" in results:
        found = results["training"]
        times = found["buckets of 64"] / found["shuffled, 64"]
        said.append(f"A small BERT trains {times:.1f} times as fast by length as in shuffled batches.")
    return "\n\n".join([*parts, " ".join(said)] if said else parts)


# -- memory over an epoch ----------------------------------------------------------------------------------------------


def memory(num_lines: int, data: Path | None, stores: list[str]) -> list[dict[str, Any]]:
    rows = []
    print(f"{'store':12} {'workers':>7} {'private':>10} {'its growth':>10} {'PSS':>10} {'lines/s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        text = data or drawn_text(Path(folder) / "lines.txt", num_lines)
        for store in stores:
            for num_workers in WORKERS:
                row = {"store": store, "workers": num_workers} | epoch_of(store, num_workers, text, Path(folder))
                rows.append(row)
                sizes = " ".join(f"{row[name] / MIB:6.0f} MiB" for name in ("private", "growth", "pss"))
                print(f"{store:12} {num_workers:7} {sizes} {row['lines_per_second']:10,.0f}", flush=True)
    return rows


def drawn_text(path: Path, num_lines: int) -> Path:
    random = np.random.default_rng(0)
    words = np.array(["".join(map(chr, random.integers(97, 123, length))) for length in random.integers(1, 11, 50_000)])
    with path.open("w", encoding="utf-8") as file:
        for begin in range(0, num_lines, 100_000):
            lengths = np.clip(random.lognormal(2.7, 0.78, min(100_000, num_lines - begin)), 1, 400).astype(int)
            drawn = words[np.minimum(random.zipf(1.2, lengths.sum()), len(words)) - 1].tolist()
            ends = np.cumsum(lengths).tolist()
            file.writelines(" ".join(drawn[start:end]) + "\n" for start, end in zip([0, *ends[:-1]], ends, strict=True))
    return path


def epoch_of(store: str, num_workers: int, text: Path, folder: Path) -> dict[str, float]:
    """Return the peak memory of an epoch, and the growth of private memory from its first tenth to its end."""
    command = [sys.executable, str(PROCESS), "read", store, str(num_workers), str(text), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        seen = list(watched(process))
        end = json.loads(process.stdout.read())
    private, pss = (np.array(column) for column in zip(*seen, strict=True))
    early = private[: max(len(private) // 10, 2)].max()
    return {
        "private": int(private.max()),
        "growth": int(private.max() - early),
        "pss": int(pss.max()),
        "lines_per_second": end["lines"] / end["seconds"],
    }


def watched(process: subprocess.Popen[str]) -> Iterator[tuple[int, int]]:
    """Yield private bytes and PSS of a process and its children, twice a second until it ends."""
    root = psutil.Process(process.pid)
    while process.poll() is None:
        sums = [0, 0]
        for one in [root, *root.children(recursive=True)]:
            try:
                rollup = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            for place, key in enumerate(("Pss_Anon:", "Pss:")):
                sums[place] += int(rollup.partition(f"\n{key}")[2].split()[0]) * 1024
        yield sums[0], sums[1]
        time.sleep(0.5)


# -- padding -----------------------------------------------------------------------------------------------------------


class Texts:
    """Samples of lognormal lengths."""

    def __init__(self, num_texts: int) -> None:
        tokens = np.random.default_rng(0).lognormal(3.0, 0.78, num_texts)
        self.tokens = np.clip(tokens, 1, 512).astype(np.uint16)

    def __len__(self) -> int:
        return len(self.tokens)

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.integer]:
        return self.tokens[ids]

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return random tokens, padded to the longest sample of the batch."""
        inside = (
            torch.arange(int(self.tokens[ids].max())) < torch.from_numpy(self.tokens[ids].astype(np.int64))[:, None]
        )
        input_ids = torch.randint(5, 5000, inside.shape) * inside
        return {"input_ids": input_ids, "attention_mask": inside.long(), "labels": torch.from_numpy(ids % 2)}


def padding(num_texts: int) -> dict[str, dict[str, float]]:
    texts = Texts(num_texts)
    multiple = pad_multiple_for(texts.tokens)
    policies: dict[str, int | Buckets] = {
        "shuffled, 64": 64,
        "buckets of 64": Buckets(batch_size=64),
        f"buckets of 64, to {multiple}": Buckets(batch_size=64, pad_multiple=multiple),
        "buckets of 64, to 8": Buckets(batch_size=64, pad_multiple=8),
        "4,096 tokens": Buckets(max_tokens=4096),
        "16,384 tokens": Buckets(max_tokens=16384),
        f"16,384 tokens, to {multiple}": Buckets(max_tokens=16384, pad_multiple=multiple),
        "16,384 tokens, to 8": Buckets(max_tokens=16384, pad_multiple=8),
    }
    rows = {}
    print(f"{'batches':20} {'number':>9} {'padding':>8} {'samples/s':>12}")
    for name, policy in policies.items():
        row = rows[name] = planned(texts, batches_of(texts, policy), getattr(policy, "pad_multiple", None) or 1)
        print(f"{name:20} {row['batches']:9,.0f} {row['padding']:8.2%} {row['samples_per_second']:12,.0f}", flush=True)
    everything = 1 - float(texts.tokens.mean()) / 512
    print(f"{'all to 512':20} {'':9} {everything:8.2%}")
    return rows | {"all to 512": {"padding": everything}}


def planned(texts: Texts, batches: Batches, multiple: int) -> dict[str, float]:
    """Plan the batches of an epoch at full speed, and count the padding."""
    cursor, planned_ids = Cursor(1), []
    started_seconds = time.perf_counter()
    while cursor.epoch == 1:
        planned_ids.append(batches.ids(cursor))
        cursor = batches.following(cursor)
    seconds = time.perf_counter() - started_seconds
    padded_tokens = sum(len(ids) * -(-int(texts.tokens[ids].max()) // multiple) * multiple for ids in planned_ids)
    num_batches = len(planned_ids)
    share = 1 - int(texts.tokens.sum(dtype=np.int64)) / padded_tokens
    return {"batches": num_batches, "padding": share, "samples_per_second": len(texts) / seconds}


# -- training ----------------------------------------------------------------------------------------------------------


def training(num_texts: int, num_rounds: int) -> dict[str, float]:
    """Return the useful tokens per second of the median round of an epoch; the policies take turns."""
    texts = Texts(num_texts)
    policies: dict[str, int | Buckets] = {
        "shuffled, 64": 64,
        "buckets of 64": Buckets(batch_size=64, pool_samples=num_texts),
        "2,048 tokens": Buckets(max_tokens=2048, pool_samples=num_texts),
    }
    speeds: dict[str, list[float]] = {name: [] for name in policies}
    for _ in range(num_rounds):
        for name, policy in policies.items():
            speeds[name].append(int(texts.tokens.sum(dtype=np.int64)) / epoch_seconds(texts, policy))
    medians = {name: float(np.median(some)) for name, some in speeds.items()}
    print(f"{'training':20} {'tokens/s':>10} {'of shuffled':>11}")
    for name, speed in medians.items():
        print(f"{name:20} {speed:10,.0f} {speed / medians['shuffled, 64']:10.2f}x")
    return medians


def epoch_seconds(texts: Texts, policy: int | Buckets) -> float:
    """Train a BERT of 2 layers and width 128 for an epoch."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=5000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    started_seconds = time.perf_counter()
    for fields in Loader(texts, policy):
        model(**fields).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started_seconds


# -- kills -------------------------------------------------------------------------------------------------------------


def kills(num_kills: int, seed: int = 1) -> dict[str, Any]:
    """Kill a training and its workers at random moments, resume it, and compare its batches with the expected ones.

    One kill in three hits the training, or every kill if it has no workers left.
    """
    random = np.random.default_rng(seed)
    counted = {"training": 0, "worker": 0}
    num_batches = 500 * num_kills
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        journal.touch()
        while run_and_kill(journal, num_batches, num_kills, counted, random):
            pass
        fed = [json.loads(line)["ids"] for line in whole_lines(journal)]
    loader, due = Loader(Numbers(), CONSUMED, 1), []
    while len(due) < num_batches:
        due += [fields["ids"].tolist() for fields in loader]
    lost = sum(one != other for one, other in zip(fed, due, strict=False)) + abs(num_batches - len(fed))
    print(f"{counted['training']} kills of the training and {counted['worker']} of workers: {num_batches:,} batches, "
          f"{lost} of them not as without kills")  # fmt: skip
    return counted | {"batches": num_batches, "wrong": lost}


def run_and_kill(
    journal: Path, num_batches: int, num_kills: int, counted: dict[str, int], random: np.random.Generator
) -> bool:
    """Resume the training with another number of workers until it is killed, and return whether it has not ended."""
    command = [sys.executable, str(PROCESS), "consume", str(journal), str(random.integers(1, 4)), str(num_batches)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        root = psutil.Process(process.pid)
        while sum(counted.values()) < num_kills:
            time.sleep(random.uniform(0, 0.2))
            if process.poll() is not None:
                break
            workers = [one for one in root.children() if one.status() != psutil.STATUS_ZOMBIE]
            if not workers or random.random() < 1 / 3:
                process.kill()
                counted["training"] += 1
                break
            workers[random.integers(len(workers))].kill()
            counted["worker"] += 1
    return process.returncode != 0


if __name__ == "__main__":
    main()
