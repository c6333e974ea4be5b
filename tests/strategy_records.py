"""Fine-tuning strategies of a made-up model, small enough to check by hand."""

from __future__ import annotations

from plan_records import CHECKPOINTS, duration
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.strategies import Strategies, Strategy
from prediction_records import MIB, estimate


def strategies(**changes: object) -> Strategies:
    """Return all weights needing 3000 of 2048 MiB, streamed weights needing 1500, and unavailable adapters."""
    streamed = Choice(technique="parameter_offload", options={"gradients": True})
    fields: dict[str, object] = {
        "subject": "gpt2, 8 x 128 tokens a step",
        "device": "cpu",
        "limit_bytes": 2048 * MIB,
        "strategies": (
            Strategy(
                name="full", changes="nothing", how="--forbid parameter_offload",
                choices=(CHECKPOINTS, micro_batch_choice(1)), peak=estimate(3000, 100), step_time=duration(1.5, 0.5),
                smallest_budget_bytes=3100 * MIB,
            ),
            Strategy(
                name="full, weights streamed", changes="nothing: the same numbers, more slowly",
                how="--pin parameter_offload", choices=(streamed, micro_batch_choice(2)), peak=estimate(1500),
                step_time=duration(12.0),
            ),
            Strategy(
                name="LoRA", changes="other model: low-rank adapters on frozen weights",
                how="--set 'allow=[lora]' --pin 'lora(base=kept)'", impossible="peft is not installed",
            ),
        ),
    }  # fmt: skip
    return Strategies.model_validate(fields | changes)


def none_fits() -> Strategies:
    """Return the first and the last strategy only."""
    first, _, last = strategies().strategies
    return strategies(strategies=(first, last))
