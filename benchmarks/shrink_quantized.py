"""Size and speed of torchao's quantized models on this processor, compared with float32 and bfloat16.

    OMP_NUM_THREADS=1 python benchmarks/shrink_quantized.py --rounds 7

The models are a BERT classifier of 25 million weights and a GPT-2 of 30 million; their weights are new, which affects
neither time nor memory. For each form the benchmark measures:

- the bytes of the file;
- the private peak of a process that loads it and passes 1 x 128 tokens, minus a process with the same imports;
- the seconds of a pass of 1 and of 32 rows relative to float32; the forms take turns in each round;
- the difference from the logits in float32.

Prints a table, and one JSON object with the figures as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from plimsoll.compression.methods import SHRINKERS, Bundle, Calibration
from plimsoll.models.loading import load_model
from plimsoll.records.plan import Choice
from plimsoll.weights.parts import model_bytes

LENGTH = 128
VOCABULARY = 8000
FORMS: dict[str, tuple[Choice, ...]] = {
    "float32": (),
    "bfloat16": (),
    "int8": (Choice(technique="int8"),),
    "int4, 32": (Choice(technique="int4", options={"group": 32}),),
    "int4, 128": (Choice(technique="int4", options={"group": 128}),),
    "int4, fp32": (Choice(technique="int4", options={"group": 32, "compute": "fp32"}),),
    "dynamic_int8": (Choice(technique="dynamic_int8"),),
    "float8": (Choice(technique="float8"),),
    "embeddings": (Choice(technique="int8_embeddings"),),
    "both int8": (Choice(technique="int8_embeddings"), Choice(technique="dynamic_int8")),
}
SLOW = {"int4, fp32"}
"""Forms that are timed with one row only."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--models", nargs="+", default=["bert", "gpt2"])
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            figures[name] = measured(name, Path(folder) / name, options.rows, options.rounds)
            print_table(name, figures[name], options.rows)
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "models": figures}))


def measured(name: str, folder: Path, rows: list[int], rounds: int) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for form in FORMS:
        made = save(name, form, folder / form)
        if isinstance(made, str):
            print(f"{name}, {form}: {made}")
        else:
            figures[form] = made
    baseline_bytes = peak_bytes(None, "float32")
    for form, row in figures.items():
        row["baseline_bytes"] = baseline_bytes
        row["peak_bytes"] = peak_bytes(folder / form, dtype_of(form)) - baseline_bytes
    models = {form: load_model(folder / form, dtype=getattr(torch, dtype_of(form))).model for form in figures}
    generator = torch.Generator().manual_seed(0)
    for num_rows in rows:
        ids = torch.randint(0, VOCABULARY, (num_rows, LENGTH), generator=generator)
        timed = {form: model for form, model in models.items() if num_rows == 1 or form not in SLOW}
        seconds = interleaved(timed, ids, rounds)
        for form, row in ((form, figures[form]) for form in timed):
            row[f"seconds_{num_rows}"] = statistics.median(seconds[form])
            ratios = [own / dense for own, dense in zip(seconds[form], seconds["float32"], strict=True)]
            row[f"ratio_{num_rows}"] = statistics.median(ratios)
    with torch.inference_mode():
        ids = torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator)
        expected = models["float32"](ids).logits
        for form, row in figures.items():
            error = (models[form](ids).logits.float() - expected).norm() / expected.norm()
            row["relative_error"] = float(error)
    return figures


def save(name: str, form: str, folder: Path) -> dict[str, Any] | str:
    """Make the model in a form and save it; return its bytes, or the reason why the form is unavailable."""
    model = dense_model(name)
    if form == "bfloat16":
        model.to(torch.bfloat16)
    bundle = Bundle(model)
    for choice in FORMS[form]:
        fault = SHRINKERS[choice.technique].refusal(bundle, choice)
        if fault is not None:
            return fault
        SHRINKERS[choice.technique].shrink(bundle, choice, Calibration())
    model.save_pretrained(folder)
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"file_bytes": file_bytes, "weight_bytes": model_bytes(model)}


def dense_model(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if name == "bert":
        sizes = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
        config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=4, **sizes)
        return transformers.BertForSequenceClassification(config).eval()
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=512, n_layer=8, n_head=8)
    return transformers.GPT2LMHeadModel(config).eval()


def dtype_of(form: str) -> str:
    return "bfloat16" if form in ("bfloat16", "int4, 32", "int4, 128") else "float32"


def interleaved(models: dict[str, Any], ids: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Time passes of all forms in turns; the first round is not counted."""
    seconds: dict[str, list[float]] = {form: [] for form in models}
    with torch.inference_mode():
        for number in range(rounds + 1):
            for form, model in models.items():
                begin = time.perf_counter()
                model(ids)
                if number:
                    seconds[form].append(time.perf_counter() - begin)
    return seconds


def peak_bytes(folder: Path | None, dtype: str) -> int:
    """Return the peak private memory of a process that loads a folder and computes, read from outside every 2 ms."""
    command = [sys.executable, str(Path(__file__).with_name("_shrunk_process.py")), str(folder or "-"), "1", "128"]
    with subprocess.Popen([*command, dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        is_over, peak = threading.Event(), [0]

        def watch() -> None:
            while not is_over.is_set():
                peak[0] = max(peak[0], private_bytes_of(process.pid))
                time.sleep(0.002)

        watcher = threading.Thread(target=watch)
        watcher.start()
        process.stdin.write("\n")
        process.stdin.flush()
        said = process.stdout.readline().strip()
        is_over.set()
        watcher.join()
        if said != "done":
            raise RuntimeError(f"the process of {folder} said {said!r}: see above")
        process.stdin.write("\n")
    return peak[0]


def private_bytes_of(process: int) -> int:
    lines = (Path("/proc") / str(process) / "smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss_Anon")).split()[1]) << 10


def print_table(name: str, figures: dict[str, dict[str, Any]], rows: list[int]) -> None:
    dense = figures["float32"]
    print(f"{name}: float32 has {dense['weight_bytes'] / 2**20:.1f} MiB of weights; imports "
          f"{dense['baseline_bytes'] / 2**20:.1f} MiB")  # fmt: skip
    times = "".join(f"{f'{number} x {LENGTH}':>22}" for number in rows)
    print(f"{'form':14}{'file':>12}{'peak':>12}{'fell by, of weights':>22}{times}{'error':>10}")
    for form, row in figures.items():
        fell_bytes = dense["weight_bytes"] - row["weight_bytes"]
        share = f"{(dense['peak_bytes'] - row['peak_bytes']) / fell_bytes:.2f}" if fell_bytes else "-"
        seconds = "".join(f"{timed(row, number):>22}" for number in rows)
        print(
            f"{form:14}{row['file_bytes'] / 2**20:8.1f} MiB{row['peak_bytes'] / 2**20:8.1f} MiB{share:>22}{seconds}"
            f"{row['relative_error']:10.1e}"
        )


def timed(row: dict[str, Any], number: int) -> str:
    if f"seconds_{number}" not in row:
        return "-"
    return f"{row[f'seconds_{number}'] * 1e3:.1f} ms ({row[f'ratio_{number}']:.2f} x)"


if __name__ == "__main__":
    main()
