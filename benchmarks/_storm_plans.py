"""Trainings of `storm.py` with the techniques of a plan, which move from one fallback to the next.

Techniques have no equivalent in a plain loop. The reference is the same training with the fallback of each step given
from the start (`_storm_run.forced`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from _storm_models import Encoder, Recurrent, classified, gpt2, mlp, of_language, trained
from _storm_run import Kind, Training
from _storm_states import BUFFERS, Buffered, Teacher, in_place
from plimsoll.records.plan import Choice, micro_batch_choice


def choice(technique: str, **options: Any) -> Choice:
    return Choice(technique=technique, options=options)


CHECKPOINTED = choice("checkpointing", blocks="all")
ON_DISK = choice("activation_offload", to="disk")
STATES_ON_DISK = choice("optimizer_offload", to="disk")
LOSS_IN_CHUNKS = choice("chunked_loss", chunk_tokens=8)
IN_BACKWARD = choice("optimizer_in_backward")
STREAMED = choice("layer_streaming", blocks="all")
GRADIENTS_ON_DISK = choice("parameter_offload", gradients=True)
WEIGHTS_ON_DISK = choice("parameter_offload", gradients=False)
IN_SEGMENTS = choice("time_segments", steps=3)
InstalledFallbacks = Sequence[Sequence[Choice]]


def falling(*steps: tuple[int, Sequence[Choice]]) -> InstalledFallbacks:
    return [(micro_batch_choice(samples), *choices) for samples, choices in steps]


PLANS: dict[str, InstalledFallbacks] = {
    "micro-batches 4, 2, 1": falling((4, ()), (2, ()), (1, ())),
    "checkpointing": falling((4, (CHECKPOINTED,)), (2, (CHECKPOINTED,)), (1, (CHECKPOINTED,))),
    "then checkpointing": falling((4, ()), (4, (CHECKPOINTED,)), (2, (CHECKPOINTED,))),
    "then activations on disk": falling((4, ()), (4, (ON_DISK,)), (2, (ON_DISK,))),
    "then states on disk": falling((4, ()), (4, (STATES_ON_DISK,)), (2, (STATES_ON_DISK,))),
    "states on disk": falling((4, (STATES_ON_DISK,)), (2, (STATES_ON_DISK,))),
    "then updates in backward": falling((4, ()), (4, (IN_BACKWARD,))),
    "updates in backward": falling((4, (IN_BACKWARD,)), (4, (IN_BACKWARD, CHECKPOINTED))),
    "weights on disk": falling((4, (WEIGHTS_ON_DISK,)), (2, (WEIGHTS_ON_DISK,))),
    "weights and gradients on disk": falling((4, (GRADIENTS_ON_DISK,)), (2, (GRADIENTS_ON_DISK,))),
    "layers streamed": falling((4, (STREAMED,)), (2, (STREAMED,))),
    "then layers streamed": falling((4, ()), (4, (STREAMED,)), (2, (STREAMED,))),
    "everything in turn": falling(
        (4, ()), (2, ()), (2, (CHECKPOINTED,)), (2, (CHECKPOINTED, STATES_ON_DISK)), (1, (ON_DISK, STATES_ON_DISK))
    ),
}
OF_LANGUAGE: dict[str, InstalledFallbacks] = {
    "loss in chunks": falling((4, (LOSS_IN_CHUNKS,)), (2, (LOSS_IN_CHUNKS,))),
    "then loss in chunks": falling((4, ()), (4, (LOSS_IN_CHUNKS,)), (2, (LOSS_IN_CHUNKS,))),
    "then checkpointing": PLANS["then checkpointing"],
}
STATES: dict[str, Callable[[], nn.Module]] = {
    "teacher": partial(Teacher, in_place),
    "integer buffer": partial(Buffered, *BUFFERS["integer buffer counts through .data"]),
    "BatchNorm": lambda: mlp(nn.BatchNorm1d(8)),
}
STATES_OF_PLANS = ("micro-batches 4, 2, 1", "then states on disk", "then updates in backward")


def planned(model: nn.Module, fallbacks: InstalledFallbacks, loss: Any = classified, **options: Any) -> Training:
    return trained(model, loss, fallbacks=fallbacks, **options)


def kinds() -> list[Kind]:
    """Return plans for a transformer with dropout, and some for other models."""
    found = [Kind("plans", name, partial(_of, partial(Encoder, 0.1), fallbacks)) for name, fallbacks in PLANS.items()]
    large = partial(gpt2, vocabulary=1024)  # large in comparison with the width, the case that such a loss is made for
    found += [
        Kind("plans", f"GPT-2, {name}", partial(_of, large, fallbacks, of_language))
        for name, fallbacks in OF_LANGUAGE.items()
    ]
    lstm = partial(Recurrent, nn.LSTM)
    found.append(Kind("plans", "LSTM, then in segments", partial(_of, lstm, falling((4, ()), (4, (IN_SEGMENTS,))))))
    for state, make in STATES.items():
        found += [Kind("plans", f"{state}, {name}", partial(_of, make, PLANS[name])) for name in STATES_OF_PLANS]
    return found


def _of(make: Callable[[], nn.Module], fallbacks: InstalledFallbacks, loss: Any = classified) -> Training:
    torch.manual_seed(0)
    return planned(make(), fallbacks, loss)
