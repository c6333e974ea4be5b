"""A plan as keyword arguments of `transformers.TrainingArguments`, as far as these have the same techniques.

    arguments, unmapped = plimsoll.transformers.to_training_arguments(plan, batch_size=64)
    args = transformers.TrainingArguments("out", **arguments)

What they lack is said, not left out: `plimsoll.transformers.fit` uses the plan itself. Does NOT import transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plimsoll.records.plan import Choice, Plan


def to_training_arguments(plan: Plan, batch_size: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate a plan into keyword arguments of `transformers.TrainingArguments`, where it maps.

    Args:
        plan: the plan.
        batch_size: samples of an optimizer step.

    Returns:
        the arguments, and a sentence for each choice that has none.
    """
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": batch_size}
    unmapped: list[str] = []
    for choice in plan.fallbacks[0].choices:
        mapped = _MAPPED.get(choice.technique, _unknown)(choice, batch_size)
        if mapped is None:
            unmapped.append(f"{choice}: TrainingArguments has nothing like it, use plimsoll.transformers.fit")
        else:
            arguments |= mapped
    micro_batches = arguments["gradient_accumulation_steps"] * arguments["per_device_train_batch_size"]
    if micro_batches != batch_size:
        unmapped.append(
            f"batches of {batch_size} samples are not divided evenly by {arguments['per_device_train_batch_size']}: "
            f"these arguments make steps of {micro_batches}"
        )
    return arguments, tuple(unmapped)


def _checkpointing(choice: Choice, _: int) -> dict[str, Any] | None:
    return {"activation_checkpointing": True} if choice.options.get("blocks", "all") == "all" else None


def _micro_batch(choice: Choice, batch_size: int) -> dict[str, Any]:
    samples = int(choice.options["samples"])
    return {
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": max(round(batch_size / samples), 1),
    }


def _unknown(choice: Choice, batch_size: int) -> None:
    return None


_MAPPED: dict[str, Callable[[Choice, int], dict[str, Any] | None]] = {
    "micro_batch": _micro_batch,
    "checkpointing": _checkpointing,
    "autocast": lambda choice, _: {str(choice.options["dtype"]): True},
    "evaluation": lambda choice, _: {"per_device_eval_batch_size": int(choice.options["samples"])},
    "adafactor": lambda _choice, _: {"optim": "adafactor"},
    "low_bit_optimizer": lambda choice, _: {"optim": "adamw_8bit"} if choice.options.get("bits") == 8 else None,
}
