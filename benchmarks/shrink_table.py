"""Every compression method on a classifier and a language model: bytes, memory, speed and quality, over several seeds.

    python benchmarks/shrink_table.py --data agnews-test.csv        # label, title, body; no header, as AG News has
    python benchmarks/shrink_table.py --text wikitext2-test.txt     # a language model
    python benchmarks/shrink_table.py                               # generated sentences, in some minutes

For each seed a model is trained. Then `plimsoll shrink` applies every choice of every method alone, measured before and
after ``--recover`` steps of training. It then searches for the best chain below ``--share`` of the bytes. Finally half
of the layers are removed, and the model is trained again with and without the original as its teacher.

The kernel measures the memory of a process; the reduction of weights is compared with the reduction of the inference
peak. Passes are timed in turns with the original's; training steps are timed by `plimsoll shrink` only. Prints a table
of means and standard deviations, and one JSON object as the last line. Linux only.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from _results import add_out, fenced, file_result, keep_printed
from _results import table as markdown

Figures = dict[str, Any]

LEAST_FALL_BYTES = 1 << 20  # smaller reductions are within the random variation of a process's pages

CLASSIFIER = {
    "architecture": "bert", "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 768,
}  # fmt: skip
LANGUAGE_MODEL = {
    "architecture": "gpt2", "n_embd": 192, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip


def sentences() -> list[tuple[str, str]]:
    """Return generated labelled sentences, for a run without a corpus."""
    drawn = random.Random(0)
    words = {
        "sport": ["match", "goal", "team", "coach", "season"],
        "market": ["shares", "profit", "bank", "prices", "trade"],
    }
    common = "the a of in on said after with new for and to is was it by as at".split()  # noqa: SIM905
    rows = []
    for number in range(3000):
        label = ("sport", "market")[number % 2]
        text = drawn.choices(common, k=14) + drawn.choices(words[label], k=2)
        drawn.shuffle(text)
        rows.append((label, " ".join(text)))
    return rows


def job_of(args: argparse.Namespace, folder: Path, seed: int) -> Figures:
    if args.text is not None:
        return {
            "model": LANGUAGE_MODEL, "task": "language-modeling", "sequence_length": 128, "batch_size": 8,
            "data": {"train": [str(path.resolve()) for path in args.text], "validation": 0.1},
            "tokenizer": {"train": "bpe", "vocab_size": 6000}, "steps": args.steps, "seed": seed,
            "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0},
        }  # fmt: skip
    rows = sentences()
    if args.data is not None:
        with args.data.open(newline="", encoding="utf-8") as file:
            rows = [(row[0], " ".join(row[1:])) for row in csv.reader(file)]
    with (folder / "texts.tsv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t").writerows([("label", "text"), *rows])
    return {
        "model": CLASSIFIER, "task": "classification", "sequence_length": 64, "batch_size": 32,
        "data": {
            "train": str(folder / "texts.tsv"), "label": "label", "text": "text", "validation": 0.2,
            "long_texts": "truncate",
        },
        "tokenizer": {"train": "bpe", "vocab_size": 6000}, "steps": args.steps, "seed": seed,
        "optimizer": {"name": "adamw", "lr": 3e-4, "clip_norm": 1.0},
    }  # fmt: skip


def plimsoll(*arguments: Any) -> Figures:
    command = [sys.executable, "-m", "plimsoll", *map(str, arguments), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def shrunk(run: Path, out: Path, *arguments: Any) -> Figures:
    """Run `plimsoll shrink` and return its record, or read the record of an earlier call in ``--keep``."""
    record = out / "shrink.json"
    return json.loads(record.read_text()) if record.is_file() else plimsoll("shrink", run, "--out", out, *arguments)


def name_of(model: Figures) -> str:
    return " > ".join(
        choice["technique"]
        + ("(" + ",".join(f"{k}={v}" for k, v in choice["options"].items()) + ")" if choice["options"] else "")
        for choice in model["chain"]
    )


def score(quality: Figures | None) -> float | None:
    if quality is None:
        return None
    return quality["accuracy"] * 100 if quality["accuracy"] is not None else quality["loss"]


def spread(values: list[float | None], digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    deviation = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.{digits}f}{deviation}".replace("-0.00", "0.00")


def change(figures: Figures, when: str) -> float | None:
    """Return the difference in quality between a model and its original."""
    return None if figures[when] is None or figures["before"] is None else figures[when] - figures["before"]


def figures_of(model: Figures, original: Figures) -> Figures:
    """Return the figures of one model of one seed, relative to its original."""
    first, cost = original["inference"], model["inference"]
    fall = original["weight_bytes"] - model["weight_bytes"]
    peak = first["peak_bytes"] - first["baseline_bytes"], cost["peak_bytes"] - cost["baseline_bytes"]
    training = model["training"] or {}  # with the original as the teacher
    return {
        "share": model["file_bytes"] / original["file_bytes"],
        "weight_fall_bytes": fall,
        "peak_fall_bytes": peak[0] - peak[1],
        "peak_bytes": cost["peak_bytes"],
        "predicted_bytes": cost["predicted"] and cost["predicted"]["likely_bytes"],
        "speed": cost["speed"],  # of passes that were timed in turns with the original's
        "training_peak_bytes": training.get("peak_bytes"),
        "training_predicted_bytes": (training.get("predicted") or {}).get("likely_bytes"),
        "before": score(original["quality"]), "after": score(model["quality"]),
        "recovered": score(model["recovered"]),
    }  # fmt: skip


def table_of(found: dict[str, list[Figures]], title: str, measure: str) -> Table:
    columns = (
        "chain", "seeds", "files, %", "peak fall / weights fall", "rows/s", "training peak, MiB", f"{measure}: given",
        "change made", "trained again",
    )  # fmt: skip
    table = Table(*columns, title=title)
    for name, seeds in found.items():
        falls = [
            one["peak_fall_bytes"] / one["weight_fall_bytes"]
            for one in seeds
            if one["weight_fall_bytes"] > LEAST_FALL_BYTES
        ]
        peaks = [one["training_peak_bytes"] and one["training_peak_bytes"] / 2**20 for one in seeds]
        table.add_row(
            name, str(len(seeds)), spread([100 * one["share"] for one in seeds], 1), spread(falls) if falls else "-",
            "x " + spread([one["speed"] for one in seeds]), spread(peaks, 0), spread([one["before"] for one in seeds]),
            spread([change(one, "after") for one in seeds]), spread([change(one, "recovered") for one in seeds]),
        )  # fmt: skip
    return table


def part_of(best: list[Figures], methods: dict[str, list[Figures]], args: argparse.Namespace) -> str:
    """Return the part that pages show: the best chain of each seed, and bfloat16."""
    unit = "of the loss" if args.text else "points of accuracy"
    title = "a GPT-2 of 4 x 192" if args.text else "a BERT of 4 x 192 on AG News" if args.data else "a BERT of 4 x 192"
    rows = [
        (
            f"{one['chain'].replace('>', 'then')}, seed {number}",
            f"{one['share']:.0%}",
            f"{change(one, 'recovered') or 0:+.1f}",
        )
        for number, one in enumerate(best)
    ]
    if half := methods.get("bf16"):
        shares, changes = ([one["share"] for one in half], [change(one, "after") or 0 for one in half])
        rows.append((f"bf16, {len(half)} seeds", f"{statistics.mean(shares):.0%}", f"{statistics.mean(changes):+.1f}"))
    header = (f"{title}, under {args.share:.0%} of its bytes, trained again for {args.recover} steps", "files", unit)
    return markdown(header, rows) if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="csv file without a header: label, title, body")
    parser.add_argument(
        "--text", type=Path, action="append", help="text file for a language model, instead of a classifier"
    )
    parser.add_argument("--steps", type=int, default=500, help="training steps of each original")
    parser.add_argument("--recover", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.25, help="goal of the search, as a share of the bytes")
    parser.add_argument("--only", choices=("methods", "best", "teacher"), action="append", help="default: all three")
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder that keeps the work, and from which a run with the same options resumes",
    )
    add_out(parser)
    args = parser.parse_args()
    printed = keep_printed()
    only = args.only or ("methods", "best", "teacher")
    found: dict[str, list[Figures]] = {}
    best: list[Figures] = []
    with_teacher: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for seed in range(args.seeds):
            run = folder / f"run-{seed}"
            if not (run / "model" / "config.json").is_file():
                (folder / "job.yaml").write_text(json.dumps(job_of(args, folder, seed)))
                plimsoll("train", folder / "job.yaml", "--out", run, "--no-plan", "--force")
            if "methods" in only:
                survey = shrunk(run, folder / f"survey-{seed}", "--recover", args.recover, "--keep-all")
                original = survey["models"][0]
                for model in survey["models"][1:]:
                    found.setdefault(name_of(model), []).append(figures_of(model, original))
            if "best" in only:
                size = sum(path.stat().st_size for path in (run / "model").glob("*.safetensors"))
                options = ("--target", int(size * args.share), "--recover", args.recover)
                work, best_folder = folder / f"survey-{seed}" / ".shrink", folder / f"best-{seed}"
                if work.is_dir() and not (best_folder / ".shrink").exists():  # it is not measured again
                    best_folder.mkdir(exist_ok=True)
                    work.rename(best_folder / ".shrink")
                searched = shrunk(run, best_folder, *options)
                chosen = searched["models"][searched["best"]]
                best.append({"chain": name_of(chosen)} | figures_of(chosen, searched["models"][0]))
            for name, flags in (("with", ()), ("without", ("--no-distill",))) if "teacher" in only else ():
                options = ("--method", "layers=2", "--recover", 3 * args.recover, *flags)
                half = shrunk(run, folder / f"half-{name}-{seed}", *options)
                original, small = half["models"]
                with_teacher.setdefault(f"layers(keep=2), {name} a teacher", []).append(figures_of(small, original))
    measure = "loss" if args.text else "accuracy, %"
    title = f"{args.seeds} seeds, trained {args.steps} steps, {args.recover} again"
    if found:
        Console(width=160).print(table_of(found, title, measure))
    if best:
        chains = {f"seed {number}: {one['chain']}": [one] for number, one in enumerate(best)}
        Console(width=160).print(table_of(chains, f"best chain under {args.share:.0%} of the bytes", measure))
    if with_teacher:
        Console(width=160).print(table_of(with_teacher, f"half of the layers, {3 * args.recover} steps again", measure))
    packages = ("torch", "transformers", "torchao")
    part = part_of(best, found, args)
    file_result(args.out, "shrink-table", f"Every method, {title}", fenced(printed.text), part, packages=packages)
    print(json.dumps({"methods": found, "best": best, "taught": with_teacher}))


if __name__ == "__main__":
    main()
