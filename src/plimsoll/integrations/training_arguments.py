"""The translation of a plan into keyword arguments of `transformers.TrainingArguments`.

    arguments, unmapped = plimsoll.transformers.to_training_arguments(plan, batch_size=64)
    args = transformers.TrainingArguments("out", **arguments)

Choices without an equivalent argument are listed in ``unmapped``; `plimsoll.transformers.fit` uses the whole plan. Does
NOT import transformers.
"""

from __future__ import annotations

from typing import Any

from plimsoll.integrations.exports import kind_of
from plimsoll.records.plan import MICRO_BATCH, Plan
from plimsoll.techniques import TECHNIQUES


def to_training_arguments(plan: Plan, batch_size: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate a plan into keyword arguments of `transformers.TrainingArguments`.

    Args:
        plan: the plan.
        batch_size: the number of samples per optimizer step.

    Returns:
        The arguments, and a sentence for each choice without an equivalent argument.
    """
    sizes = (int(choice.options["samples"]) for choice in plan.choices if choice.technique == MICRO_BATCH)
    samples = next(sizes, batch_size)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": max(round(batch_size / samples), 1),
    }
    unmapped: list[str] = []
    for choice in plan.fallbacks[0].others:
        technique = TECHNIQUES.get(choice.technique)
        exported = technique.exported(choice, "transformers", kind_of(plan)) if technique is not None else None
        if exported is None:
            unmapped.append(f"{choice}: TrainingArguments has no equivalent, use plimsoll.transformers.fit")
        else:
            arguments |= exported.settings
    micro_batches = arguments["gradient_accumulation_steps"] * arguments["per_device_train_batch_size"]
    if micro_batches != batch_size:
        unmapped.append(
            f"a batch of {batch_size} samples is not divisible by {arguments['per_device_train_batch_size']}: "
            f"with these arguments, a step has {micro_batches} samples"
        )
    return arguments, tuple(unmapped)
