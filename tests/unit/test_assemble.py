"""From a job to a training: what it needs at least, what makes it the same one, and what is drawn from its seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plimsoll.assemble import assemble, choose_device, fingerprint, require_room
from plimsoll.data.prepare import Prepared, PreparedText
from plimsoll.errors import BudgetError, JobError
from plimsoll.records.job import Job

TEXT = PreparedText(tokens_folder="none", num_documents=1, num_bytes=1, num_tokens=1, num_skipped=0, skipped=())
PREPARED = Prepared(key="k", train=TEXT, tokenizer_folder="none", vocab_size=10, end_id=0)

# Weights of an LSTM language model with a vocabulary of V = 10, embeddings of E = 2 and states of H = 3:
#   embedding  V E                   = 20
#   LSTM       4 H E + 4 H H + 2 4 H = 24 + 36 + 24 = 84
#   head       H V + V               = 40
NUM_BYTES = 4 * (20 + 84 + 40)  # 576, in float32
FIELDS: dict[str, Any] = {
    "model": {"architecture": "lstm", "embedding_size": 2, "hidden_size": 3},
    "data": "none.txt",
    "batch_size": 4,
    "steps": 10,
}


def job_with(**changes: Any) -> Job:
    return Job.from_fields(FIELDS | changes)


@pytest.mark.parametrize(
    ("optimizer", "num_copies"),
    [
        ({"name": "sgd"}, 2),  # the weights and their gradients
        ({"name": "sgd", "momentum": 0.9}, 3),
        ({"name": "adamw"}, 4),
        ({"name": "adamw", "amsgrad": True}, 5),
        ({"name": "adafactor"}, 2),  # its states are unknown, and not guessed
    ],
)
def test_the_room_that_is_needed_is_exact_to_the_byte(optimizer, num_copies):
    job = job_with(optimizer=optimizer)
    need_bytes = 1000 + num_copies * NUM_BYTES
    require_room(job, PREPARED, 1000, need_bytes)
    with pytest.raises(BudgetError):
        require_room(job, PREPARED, 1000, need_bytes - 1)


def test_a_budget_that_is_too_small_is_refused_with_every_part():
    """1 MiB for the interpreter; 576 B twice and 1152 B for the two states of AdamW."""
    with pytest.raises(BudgetError) as caught:
        require_room(job_with(), PREPARED, 1 << 20, 1 << 20)
    assert str(caught.value) == (
        "a budget of 1.0 MiB cannot hold this training: before the first activation 1.0 MiB are needed (interpreter "
        "and libraries 1.0 MiB, parameters 576 B, gradients 576 B, optimizer states 1.1 KiB); give a budget well above "
        "that, or a smaller model"
    )


def test_without_a_budget_nothing_is_asked():
    require_room(job_with(model="no such model"), PREPARED, 1 << 60, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": "1GiB"},
        {"checkpoint": {"every": 1, "keep": 9}},
        {"steps": 99},
        {"evaluate_every": 3},
        {"device": "cpu"},
        {"data": "moved/none.txt"},  # the key of the prepared data says what is in it
    ],
)
def test_what_may_differ_between_a_checkpoint_and_its_resume(changes):
    assert fingerprint(job_with(**changes), PREPARED) == fingerprint(job_with(), PREPARED)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model", {"model": FIELDS["model"] | {"hidden_size": 4}}),
        ("sequence_length", {"sequence_length": 128}),
        ("batch_size", {"batch_size": 8}),
        ("optimizer", {"optimizer": {"lr": 1e-3}}),
        ("optimizer", {"optimizer": {"betas": [0.9, 0.99]}}),
        ("precision", {"precision": "bf16"}),
        ("allow", {"allow": ["recut_batch_norm"]}),
        ("seed", {"seed": 1}),
        ("task", {"task": "classification"}),
    ],
)
def test_what_changes_the_training_changes_the_mark_of_its_name(name, changes):
    before, after = fingerprint(job_with(), PREPARED), fingerprint(job_with(**changes), PREPARED)
    assert [key for key in before if before[key] != after[key]] == [name]


def test_other_data_are_another_training():
    other = PREPARED.model_copy(update={"key": "other"})
    assert fingerprint(job_with(), PREPARED) | {"data": "other"} == fingerprint(job_with(), other)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_length_counts_where_the_learning_rate_follows_it(schedule):
    optimizer = {"schedule": schedule}
    before, after = (fingerprint(job_with(optimizer=optimizer, steps=steps), PREPARED) for steps in (10, 11))
    assert [key for key in before if before[key] != after[key]] == ["steps"]


def test_the_device_is_the_one_named_or_the_best_there_is():
    assert choose_device(job_with(device="cpu")) == "cpu"
    assert choose_device(job_with()) == ("cuda" if torch.cuda.is_available() else "cpu")


def of_run(finished: Any, *changes: str) -> tuple[Job, Prepared]:
    return Job.from_yaml(finished.path / "job.yaml", changes), Prepared.load(finished.path / "prepared.json")


def test_the_weights_and_the_order_of_the_samples_are_drawn_from_the_seed(finished):
    one, same = (assemble(*of_run(finished), "cpu") for _ in range(2))
    other = assemble(*of_run(finished, "seed=1"), "cpu")
    for name, weights in one.model.state_dict().items():
        assert torch.equal(weights, same.model.state_dict()[name])
    assert not torch.equal(one.model.embedding.weight, other.model.embedding.weight)
    samples = [parts.loader.peek().fields["input_ids"] for parts in (one, same, other)]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def test_a_training_has_what_its_job_asks_for(finished):
    parts = assemble(*of_run(finished, "optimizer.name=sgd", "optimizer.schedule=linear"), "cpu")
    assert parts.model.training
    assert isinstance(parts.optimizer, torch.optim.SGD)
    assert parts.schedule is not None
    assert parts.units == "next-tokens"
    assert parts.validation is not None
    assert assemble(*of_run(finished, "data.validation=0.0"), "cpu").validation is None


def test_half_precision_that_torch_cannot_do_is_refused(finished):
    with pytest.raises(JobError, match=r"precision: fp16: .* use bf16 or fp32"):
        assemble(*of_run(finished, "precision=fp16"), "cpu")
