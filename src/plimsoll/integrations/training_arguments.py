"""A plan as keyword arguments of `transformers.TrainingArguments`, as far as these have the same techniques.

    arguments, unmapped = plimsoll.transformers.to_training_arguments(plan, batch_size=64)
    args = transformers.TrainingArguments("out", **arguments)

What they lack is said, not left out: `plimsoll.transformers.fit` uses the plan itself. Does NOT import transformers.
"""

from __future__ import annotations

from typing import Any

from plimsoll.integrations.exports import kind_of
from plimsoll.records.plan import MICRO_BATCH, Plan
from plimsoll.techniques import TECHNIQUES


def to_training_arguments(plan: Plan, batch_size: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate a plan into keyword arguments of `transformers.TrainingArguments`, where it maps.

    Args:
        plan: the plan.
        batch_size: samples of an optimizer step.

    Returns:
        the arguments, and a sentence for each choice that has none.
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
            unmapped.append(f"{choice}: TrainingArguments has nothing like it, use plimsoll.transformers.fit")
        else:
            arguments |= exported.settings
    micro_batches = arguments["gradient_accumulation_steps"] * arguments["per_device_train_batch_size"]
    if micro_batches != batch_size:
        unmapped.append(
            f"batches of {batch_size} samples are not divided evenly by {arguments['per_device_train_batch_size']}: "
            f"these arguments make steps of {micro_batches}"
        )
    return arguments, tuple(unmapped)
