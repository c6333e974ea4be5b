"""`plimsoll shrink` as users run it: an embedding model, a run with a target, and a kill in the middle.

Only the first is run for each change, because the others train.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import plimsoll, start
from transformers import AutoModel, AutoTokenizer

from model_folders import model_folder, some_texts, write_rows

# The folder is loaded without Plimsoll, with the libraries that users have.
LOAD = """
import sys
sys.modules["plimsoll"] = None
import torch
from transformers import AutoModel, AutoTokenizer
model, tokenizer = AutoModel.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    batch = tokenizer(["w1 w2 w3"], return_tensors="pt")
    print(len(model.get_input_embeddings().weight), model(**batch)[0].norm().item())
"""


def shrunk(*arguments: object) -> dict[str, Any]:
    """Run the command to its end and return its record. This may take minutes if models are trained."""
    process = start("shrink", *arguments, "--json")
    output, errors = process.communicate(timeout=800)
    assert process.returncode == 0, errors
    return json.loads(output)


def loaded(folder: Path) -> tuple[int, float]:
    """Return the number of embedding rows, and the norm of a text's embedding."""
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder)], check=True, capture_output=True, text=True)
    rows, size = done.stdout.split()
    return int(rows), float(size)


@pytest.mark.slow
def test_a_model_of_embeddings_reads_only_the_words_of_a_corpus(tmp_path):
    folder = model_folder(tmp_path / "model", "BertModel")
    texts = [text.replace("w8", "w1").replace("w9", "w2") for text in some_texts(60)]
    data = write_rows(tmp_path / "x.jsonl", [*texts, "w1 w2 w3"])
    record = shrunk(folder, "--data", data, "--method", "vocabulary", "--out", tmp_path / "small")
    best = record["models"][record["best"]]
    assert best["quality"]["similarity"] == pytest.approx(1.0, abs=1e-6)
    assert best["file_bytes"] < record["models"][0]["file_bytes"]
    rows, after = loaded(tmp_path / "small")
    assert rows == 82  # of 94: without w8, w80 to w89 and w9
    batch = AutoTokenizer.from_pretrained(folder)(["w1 w2 w3"], return_tensors="pt")
    with torch.no_grad():
        before = AutoModel.from_pretrained(folder)(**batch)[0].norm().item()
    assert after == pytest.approx(before, rel=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the run of a trained classifier, which tells its two labels apart by a word."""
    root = tmp_path_factory.mktemp("shrink")
    texts = some_texts(240, 10)
    rows = [{"text": f"{text} w{88 + i % 2}", "label": "ab"[i % 2]} for i, text in enumerate(texts)]
    (root / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "model": {
            "architecture": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 128, "hidden_dropout_prob": 0.0,
        },
        "task": "classification", "sequence_length": 16, "batch_size": 16, "steps": 60,
        "data": {"train": str(root / "x.jsonl"), "label": "label", "validation": 0.25},
        "tokenizer": {"train": "words", "vocab_size": 120}, "optimizer": {"name": "adamw", "lr": 1e-3},
    }  # fmt: skip
    (root / "job.yaml").write_text(yaml.safe_dump(job))
    done = plimsoll("train", root / "job.yaml", "--no-plan", "--out", root / "run", "--json")
    assert done.returncode == 0, done.stderr
    return root / "run"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_best_under_a_target_is_found_trained_again_and_loads(run, tmp_path):
    size = sum(path.stat().st_size for path in (run / "model").glob("*.safetensors"))
    small = tmp_path / "small"
    record = shrunk(run, "--target", size // 2, "--recover", 20, "--tries", 2, "--out", small)
    best = record["models"][record["best"]]
    assert best["file_bytes"] <= size // 2
    assert best["file_bytes"] == sum(path.stat().st_size for path in small.glob("*.safetensors"))
    applied = plimsoll("apply", small, "--data", run.parent / "x.jsonl", "--out", tmp_path / "y.jsonl", "--json")
    assert applied.returncode == 0, applied.stderr
    assert json.loads(applied.stdout)["num_faults"] == 0
    page = tmp_path / "small.html"
    assert plimsoll("report", small, "-o", page).returncode == 0
    assert "Quality and size" in page.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_a_kill_the_same_command_goes_on_and_makes_nothing_twice(run, tmp_path):
    command = (run, "--method", "layers=1", "--method", "int8", "--recover", 20, "--out", tmp_path / "small")
    process = start("shrink", *command, "--json")
    models = tmp_path / "small" / ".shrink" / "models"
    while not list(models.glob("*/small-*.json")) and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = {path: path.stat().st_mtime_ns for path in models.glob("*/small-*.json")}
    assert kept
    record = shrunk(*command, "--keep-all")
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert record["models"][1]["recovered"] is not None


@pytest.mark.slow
def test_ctrl_c_loses_nothing_that_was_made(run, tmp_path):
    process = start("shrink", run, "--out", tmp_path / "survey", "--json")
    models = tmp_path / "survey" / ".shrink" / "models"
    while not list(models.glob("*/small-*.json")) and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130
    assert "run the same command again to continue" in json.loads(output)["message"]
    assert list(models.glob("*/small-*.json"))
