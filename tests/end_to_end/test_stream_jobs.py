"""Streams as a user trains on them: losses and weights of the plain loop, and a state that survives a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from end_to_end.commands import (
    SMALL_JOB,
    assert_each_sample_once,
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
from plain_streams import PlainLanguageModel, plain_streams
from plimsoll.data.tokens.store import open_tokens
from plimsoll.records.prepared import Prepared
from plimsoll.records.run import RunRecord

NUM_SLOTS, LENGTH, NUM_STEPS, LONG_STEPS = 16, 64, 40, 150
RESETS = {"reset": "texts", "unit": "paragraph"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, as the commands do: sums over several threads are rounded in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job_of(folder: Path, architecture: str = "lstm", steps: int = NUM_STEPS, **data: object) -> Path:
    return write_job(
        folder / "job.yaml",
        model=SMALL_JOB["model"] | {"architecture": architecture},
        data=SMALL_JOB["data"] | {"order": "streams"} | data,
        steps=steps,
        evaluate_every=7,
        checkpoint={"every": 7, "keep": 2},
    )


def by_hand(run: Path, architecture: str, resets: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the weights of the plain loop over the tokens of a run."""
    prepared = Prepared.load(run / "prepared.json")
    store = open_tokens(Path(str(prepared.train.tokens_folder)))
    tokens = torch.from_numpy(store.tokens.astype("int64"))
    tokens = tokens[: store.ends[-1 - prepared.num_held_out_texts] + 1]  # the last texts are held out
    torch.manual_seed(0)
    model = PlainLanguageModel(architecture, prepared.vocab_size, 32, dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = plain_streams(
        model, optimizer, tokens, num_slots=NUM_SLOTS, length=LENGTH, num_steps=NUM_STEPS,
        text_begins=frozenset((store.ends + 1).tolist()) if resets else frozenset(),
    )  # fmt: skip
    return losses, {name: weight.detach() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize(
    ("architecture", "data"),
    [
        pytest.param("lstm", {}, marks=pytest.mark.slow),
        pytest.param("gru", {}, marks=pytest.mark.slow),
        pytest.param("rnn", {}, marks=pytest.mark.slow),
        ("lstm", RESETS),
    ],
    ids=str,
)
def test_a_job_learns_what_the_plain_loop_learns_bit_by_bit(architecture, data, cache, tmp_path):
    """The run has evaluations, which have their own state, and crosses the border of an epoch."""
    run = tmp_path / "run"
    trained(job_of(tmp_path, architecture, **data), "--out", run, "--cache", cache, "--no-plan")
    losses, weights = by_hand(run, architecture, resets=bool(data))
    steps = steps_of(run)
    assert [step.loss for step in steps] == losses
    assert_same_bits(weights, load_file(run / "model" / "model.safetensors"))  # and no other tensor is in the file
    assert_each_sample_once(steps, NUM_STEPS)
    assert steps[-1].epoch >= 1
    record = RunRecord.from_directory(run)
    assert record.gradient_reach.most_tokens == LENGTH - 1
    assert (record.gradient_reach.mean_tokens < 30) == bool(data)
    assert len(record.evaluations) == 6


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_its_state(cache, tmp_path):
    job = job_of(tmp_path, steps=LONG_STEPS, **RESETS)
    trained(job, "--out", tmp_path / "undisturbed", "--cache", cache, "--no-plan")
    run = tmp_path / "run"
    process = start("train", job, "--out", run, "--cache", cache, "--no-plan", "--json")
    for num_steps in (20, 60):
        wait_until(lambda least=num_steps: len(steps_of(run)) >= least, process)
        kill_all(process)
        assert len(steps_of(run)) < LONG_STEPS
        process = start("train", "--resume", "--out", run, "--json")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = learned(run)
    assert_same_bits(learned(tmp_path / "undisturbed"), found)
    assert "carried.training_state" in found
    assert found["carried.training_state"].any()
    one, other = (RunRecord.from_directory(path) for path in (tmp_path / "undisturbed", run))
    assert [line.loss for line in one.steps] == [line.loss for line in other.steps]
    assert [line.loss for line in one.evaluations] == [line.loss for line in other.evaluations]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": {"architecture": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2}}, "data.order: streams needs a"),
        ({"batch_size": 4000}, "is too short for batch_size = 4000 stream slots"),
        ({"task": "classification"}, "data.order: streams is for language-modeling"),
    ],
    ids=["transformer", "too short", "classifier"],
)
def test_where_no_state_can_be_carried_that_is_said_before_training(changes, why, cache, tmp_path):
    job = job_of(tmp_path)
    fields = [f"--set={name}={value}" for name, value in changes.items()]
    done = plimsoll("train", job, "--out", tmp_path / "run", "--cache", cache, "--no-plan", *fields)
    assert done.returncode == 2
    assert why in " ".join(done.stderr.replace("│", " ").split())
    assert not steps_of(tmp_path / "run")
