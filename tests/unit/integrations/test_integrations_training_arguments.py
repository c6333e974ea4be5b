"""Plans exported to `TrainingArguments`, and the parts of plans that it cannot express."""

from __future__ import annotations

import pytest
from transformers import TrainingArguments

from plimsoll.integrations.training_arguments import to_training_arguments
from plimsoll.records.job import Budget
from plimsoll.records.plan import Choice, micro_batch_plan


def plan_of(*choices: tuple[str, dict]):
    plan = micro_batch_plan(Budget(), (64,))
    made = tuple(Choice(technique=name, options=options) for name, options in choices)
    return plan.model_copy(update={"fallbacks": (plan.fallbacks[0].model_copy(update={"choices": made}),)})


def test_what_maps_is_accepted_by_training_arguments(tmp_path):
    plan = plan_of(
        ("micro_batch", {"samples": 16}), ("checkpointing", {"blocks": "all"}), ("autocast", {"dtype": "bf16"})
    )
    arguments, unmapped = to_training_arguments(plan, batch_size=64)
    assert arguments == {
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "activation_checkpointing": True,
        "bf16": True,
    }  # fmt: skip
    assert unmapped == ()
    made = TrainingArguments(str(tmp_path), use_cpu=True, **arguments)
    assert made.train_batch_size * made.gradient_accumulation_steps == 64


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (("checkpointing", {"blocks": "0-3"}), "TrainingArguments has nothing like it"),
        (("optimizer_offload", {}), "optimizer_offload: TrainingArguments has nothing like it"),
        (("micro_batch", {"samples": 24}), "not divided evenly by 24: these arguments make steps of 72"),
    ],
)
def test_what_does_not_map_is_said(choice, words):
    _, (sentence,) = to_training_arguments(plan_of(choice), batch_size=64)
    assert words in sentence
