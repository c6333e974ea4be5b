"""Techniques in combination: every two that do not conflict, and some more that touch the same things.

The model is restored. Losses, gradients and weights equal plain PyTorch's as the weaker numerics declare. If one
technique is lossy, they are compared with that technique alone.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from plimsoll.records.plan import Choice
from plimsoll.step.failpoints import armed
from plimsoll.techniques import TECHNIQUES, conflict_among, in_order, technique_of
from technique_trainings import (
    STRICTEST_FIRST,
    choices_of,
    configuration_of,
    expected_gradients,
    expected_of,
    expected_with,
    lossy_of,
    numerics_of,
    require_restored,
    require_the_same,
    require_the_same_gradients,
    setup_of,
    trained,
)

pytestmark = pytest.mark.usefixtures("small_storages_leave")

torch.set_num_threads(1)

MODELS = ("gpt2", "bert", "lstm", "t5", "recurrent", "tagger")
# All pairs of one model take a minute. A transformer and an LSTM always run. `make test-all` adds models like the LSTM,
# and models like GPT-2 run on request. The other contracts test each technique with all models.
LATER = {"bert": pytest.mark.slow, "t5": pytest.mark.slow, "recurrent": pytest.mark.long, "tagger": pytest.mark.long}
PAIRED = [pytest.param(name, marks=LATER.get(name, ())) for name in MODELS]


def together(training: str, *names: str) -> tuple[Choice, ...]:
    """Return the strongest choice of each technique; skip if one is not available or they conflict."""
    choices = in_order(choices_of(name, training)[-1] for name in names)
    setup = setup_of(training, choices)
    reason = conflict_among(configuration_of(*choices), setup.workload(), setup.setting())
    if reason is not None:
        pytest.skip(reason)
    return choices


def require_the_contract(training: str, choices: tuple[Choice, ...]) -> None:
    setup, numerics, lossy = setup_of(training, choices), numerics_of(choices), lossy_of(choices)
    gradients = require_restored(training, choices)
    require_the_same_gradients(gradients, expected_gradients(setup, lossy), numerics)
    found = trained(setup, configuration_of(*choices))
    assert found.events == []
    require_the_same(found, expected_with(setup, choices), numerics, is_lossy=bool(lossy))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("training", PAIRED)
@pytest.mark.parametrize(("one", "other"), list(combinations(TECHNIQUES, 2)))
def test_two_that_do_not_conflict_keep_it_together(one, other, training):
    require_the_contract(training, together(training, one, other))


STATES = ("optimizer_kernel", "optimizer_offload", "parameter_offload")
MORE = [
    ("checkpointing", "activation_offload", "chunked_loss"),
    ("optimizer_kernel", "optimizer_offload", "optimizer_in_backward"),
    ("optimizer_offload", "parameter_offload", "optimizer_in_backward"),
    ("adafactor", "optimizer_offload", "parameter_offload", "checkpointing"),
    ("low_bit_optimizer", "optimizer_offload", "parameter_offload", "checkpointing"),
    ("lora", "optimizer_offload", "parameter_offload", "checkpointing"),
    (*STATES, "autocast", "chunked_loss", "checkpointing", "activation_offload", "evaluation", "heap"),
]


@pytest.mark.parametrize("training", ["gpt2", "bert"])
@pytest.mark.parametrize("names", MORE, ids=" ".join)
def test_more_than_two_keep_it_together(names, training):
    require_the_contract(training, together(training, *names))


TOUCHING = [
    ("optimizer_offload", "optimizer_in_backward"),
    ("parameter_offload", "optimizer_in_backward"),
    ("optimizer_kernel", "optimizer_offload"),
    ("adafactor", "optimizer_offload"),
    ("low_bit_optimizer", "optimizer_in_backward"),
    *MORE,
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("phase", ["backward", "optimizer"])
@pytest.mark.parametrize("names", TOUCHING, ids=" ".join)
def test_memory_that_runs_out_takes_them_back_and_loses_nothing(names, phase):
    """Memory runs out twice in step 2. The next fallback keeps only techniques for the whole run."""
    choices = together("gpt2", *names)
    setup = setup_of("gpt2", choices)
    lasting = [choice for choice in choices if technique_of(choice.technique).is_for_the_run]
    first, second = configuration_of(*choices), configuration_of(*lasting)
    with armed(phase, 2, 3):
        found = trained(setup, first, second)
    assert found.events
    assert {event.phase for event in found.events} <= {phase, "backward"}  # some updates run in backward
    numerics = max(numerics_of(choices), numerics_of(tuple(lasting)), key=STRICTEST_FIRST.index)
    expected = expected_of(setup, second)
    require_the_same(found, expected, numerics, is_lossy=bool(lossy_of(choices)))
