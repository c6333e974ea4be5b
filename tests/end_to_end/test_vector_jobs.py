"""A GRU classifier with word vectors under `plimsoll train`: frozen, trained, killed, resumed and refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from end_to_end.commands import (
    assert_same_bits,
    kill_all,
    learned,
    plimsoll,
    start,
    steps_of,
    trained,
    wait_until,
    write_job,
)

NUM_STEPS, DIMENSION = 12, 6
WORDS = {
    "good": ["fine", "great", "lovely", "warm", "charming", "clever", "bright"],
    "bad": ["dull", "cold", "clumsy", "tired", "loud", "empty", "dreary"],
    "": [
        "the",
        "a",
        "film",
        "story",
        "was",
        "and",
        "it",
        "of",
        "with",
        "its",
        "actors",
        "ending",
        "music",
        "scenes",
        "but",
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write invented sentences about films, and vectors in which words of praise and blame are opposite."""
    drawn = random.Random(0)
    folder = tmp_path_factory.mktemp("vectors")
    rows = ["label\ttext"]
    for number in range(240):
        label = ("good", "bad")[number % 2]
        words = drawn.choices(WORDS[""], k=12) + drawn.choices(WORDS[label], k=3)
        drawn.shuffle(words)
        rows.append(f"{label}\t{' '.join(words).capitalize()}")
    (folder / "films.tsv").write_text("\n".join(rows) + "\n")
    directions = {"good": 1.0, "bad": -1.0, "": 0.0}
    with (folder / "vectors.txt").open("w") as file:
        for label, words in WORDS.items():
            for word in words:
                numbers = [directions[label], *(drawn.gauss(0, 0.3) for _ in range(DIMENSION - 1))]
                file.write(f"{word} {' '.join(f'{number:.4f}' for number in numbers)}\n")
        file.write("unused 1 1 1 1 1 1\n")
    write_job(
        folder / "job.yaml",
        model={"architecture": "gru", "hidden_size": 16},
        task="classification",
        data={"train": str(folder / "films.tsv"), "label": "label", "validation": 0.2},
        tokenizer={"train": "words", "vocab_size": 100},
        embeddings={"path": str(folder / "vectors.txt")},
        sequence_length=32, batch_size=16, steps=NUM_STEPS, evaluate_every=NUM_STEPS, optimizer={"lr": 2e-2},
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def frozen(folder: Path) -> Path:
    done = plimsoll(
        "train", folder / "job.yaml", "--out", folder / "frozen", "--cache", folder / "cache", "--no-plan",
        "--budget", "1GiB",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "said.txt").write_text(done.stderr)
    return folder / "frozen"


def vectors_of(folder: Path) -> dict[str, np.ndarray]:
    lines = [line.split() for line in (folder / "vectors.txt").read_text().splitlines()]
    return {line[0]: np.array(line[1:], np.float32) for line in lines}


def rows_of(run: Path) -> dict[str, np.ndarray]:
    from tokenizers import Tokenizer

    weight = load_file(run / "model" / "model.safetensors")["embedding.weight"]
    ids = Tokenizer.from_file(str(run / "model" / "tokenizer.json")).get_vocab()
    return {word: weight[number].numpy() for word, number in ids.items()}


def test_the_model_learns_with_the_vectors_as_they_are(folder: Path, frozen: Path):
    known, rows = vectors_of(folder), rows_of(frozen)
    assert (folder / "said.txt").read_text().count("of the text") == 1
    found = [word for word in rows if word.lower() in known]
    assert len(found) >= 29
    assert all(np.array_equal(rows[word], known[word.lower()]) for word in found)
    assert "Great" in found
    losses = [step.loss for step in steps_of(frozen)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.slow
def test_vectors_that_are_trained_begin_as_they_are_in_the_file(folder: Path, frozen: Path, tmp_path: Path):
    arguments = (folder / "job.yaml", "--cache", folder / "cache", "--no-plan", "--set", "embeddings.trainable=true")
    trained(*arguments, "--out", tmp_path / "run")
    assert steps_of(tmp_path / "run")[0].loss == steps_of(frozen)[0].loss
    known, rows = vectors_of(folder), rows_of(tmp_path / "run")
    moved = [np.abs(rows[word] - known[word]).max() for word in WORDS["good"]]
    assert min(moved) > 1e-3


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_for_bit_also_without_its_cache(folder: Path, frozen: Path, tmp_path: Path):
    run, cache = tmp_path / "run", tmp_path / "cache"
    process = start("train", folder / "job.yaml", "--out", run, "--cache", cache, "--no-plan", "--json")
    wait_until(lambda: len(steps_of(run)) >= 5, process)
    kill_all(process)
    for store in cache.glob("subset-*"):
        if store.is_dir():
            (store / "table.safetensors").write_bytes(b"torn")
    trained("--resume", "--out", run)
    assert_same_bits(learned(frozen), learned(run))


@pytest.mark.slow
def test_the_vectors_of_a_run_may_not_change_under_it(folder: Path, tmp_path: Path):
    job = (folder / "job.yaml").read_text().replace(str(folder / "vectors.txt"), str(tmp_path / "vectors.txt"))
    (tmp_path / "job.yaml").write_text(job)
    lines = (folder / "vectors.txt").read_text().splitlines(keepends=True)
    (tmp_path / "vectors.txt").write_text("".join(lines))
    trained(tmp_path / "job.yaml", "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--no-plan",
            "--set", "steps=2")  # fmt: skip
    lines[0] = f"{lines[0].split()[0]} 9 9 9 9 9 9\n"
    (tmp_path / "vectors.txt").write_text("".join(lines))
    for store in (tmp_path / "cache").glob("subset-*/manifest.json"):
        store.unlink()
    done = plimsoll("train", "--resume", "--out", tmp_path / "run", "--set", "steps=4")
    assert done.returncode == 2
    assert "are not what they were: put the file back as it was, or start anew" in done.stderr


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_the_texts_are_read(folder: Path, tmp_path: Path):
    arguments = ("train", folder / "job.yaml", "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--set")
    done = plimsoll(*arguments, "model.embedding_size=8")
    assert done.returncode == 2
    assert "has vectors of 6 numbers, but the model has an embedding of 8: set embedding_size to 6" in done.stderr
    done = plimsoll(*arguments, f"embeddings.path={tmp_path / 'none.txt'}")
    assert (done.returncode, "there is no file" in done.stderr) == (2, True)
    assert not list((tmp_path / "cache").glob("tokens-*"))


def test_a_prediction_counts_no_gradients_of_frozen_vectors(folder: Path):
    from plimsoll import Job, predict_job
    from plimsoll.data.quick_facts import sketch_texts

    job = Job.from_yaml(folder / "job.yaml", ("tokenizer.vocab_size=5000",))
    trainable = job.model_copy(update={"embeddings": job.embeddings.model_copy(update={"trainable": True})})
    frozen, trained = (predict_job(each, device="rtx3060").timeline.categories for each in (job, trainable))
    table_bytes = sketch_texts(job).vocab_size * DIMENSION * 4
    assert max(trained["parameters"]) == max(frozen["parameters"])
    assert max(trained["gradients"]) - max(frozen["gradients"]) >= table_bytes
    assert max(trained["optimizer states"]) - max(frozen["optimizer states"]) >= 2 * table_bytes
