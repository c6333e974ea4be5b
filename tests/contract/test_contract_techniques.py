"""The contract of techniques: every one of the registry, on every kind of model for which it is available.

A technique restores the objects on which it was installed. Losses, gradients and weights equal plain PyTorch's as its
numerics declare. Memory that runs out in any phase loses nothing. A dry run with it allocates the memory of a real run
with it. `test_contract_pairs` tests combinations.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.planning.dry_run.step import StageBackend, _stage, dry_run_job
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.run import PHASES_OF_A_STEP
from plimsoll.step.failpoints import armed
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, conflict_among, technique_of
from technique_trainings import (
    LARGE_VOCABULARY,
    NUM_STEPS,
    STRICTEST_FIRST,
    TRAININGS,
    WHOLE,
    Setup,
    available_choices,
    choices_of,
    configuration_of,
    expected_gradients,
    expected_of,
    lossy_of,
    numerics_of,
    require_restored,
    require_the_same,
    require_the_same_gradients,
    setup_for,
    setup_of,
    trained,
)
from workloads import BATCH_SIZE, LENGTH

pytestmark = pytest.mark.usefixtures("small_storages_leave")

torch.set_num_threads(1)

PHASES = tuple(phase for phase in PHASES_OF_A_STEP if phase != "fetch")  # fetching is outside the step
# The prediction includes memory inside kernels, which a recorder of tensors cannot see. It may exceed the recorded peak
# by this share of the plain training's peak, since techniques that shrink tensors leave kernels unchanged.
UNSEEN_SHARE = {"lstm": 0.16, "cnn": 0.16, "tagger": 0.21}
COPIED_HEAD_BYTES = 4 * (16 * 3 + 3)  # a dry run counts the head twice, because peft copies it
# A dry run assigns every token to the last cluster, which has four fifths of the vocabulary.
ALL_RARE_BYTES = 2 * 4 * BATCH_SIZE * LENGTH * LARGE_VOCABULARY

every_technique = pytest.mark.parametrize("name", TECHNIQUES)
every_training = pytest.mark.parametrize("training", TRAININGS)


@pytest.mark.sampled(4)
@every_technique
@every_training
def test_the_exit_restores_everything_and_gradients_are_those_of_plain_pytorch(name, training):
    for choice in choices_of(name, training):
        found = require_restored(training, (choice,))
        expected = expected_gradients(setup_of(training, (choice,)), lossy_of((choice,)))
        require_the_same_gradients(found, expected, numerics_of((choice,)))


@pytest.mark.sampled(4)
@every_technique
@every_training
def test_the_training_is_that_of_plain_pytorch(name, training):
    setup = setup_for(training, [name])
    for choice in choices_of(name, training):
        if technique_of(name).numerics == "lossy":
            require_learning(setup, choice)
            continue
        found = trained(setup, configuration_of(choice))
        assert found.events == []
        require_the_same(found, expected_of(setup), technique_of(name).numerics)


def require_learning(setup: Setup, choice: Choice) -> None:
    """Train on the same batch again and again, since another one may be harder, and require a lower loss."""
    step = setup.step([configuration_of(choice)])
    losses = [step(setup.case.batches()[0]).loss for _ in range(2 * NUM_STEPS)]
    assert losses[-1] < losses[0]
    step.close()


# -- memory runs out ---------------------------------------------------------------------------------------------------


def training_for(name: str) -> str:
    """Return the first training for which the technique is available and which may be split."""
    cut = [training for training, case in TRAININGS.items() if not case.has_batch_norm]
    return next((training for training in cut if not isinstance(available_choices(name, training), str)), cut[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "phase"), list(product(TECHNIQUES, PHASES)))
def test_memory_that_runs_out_in_any_phase_loses_nothing(name, phase):
    """Memory runs out twice in step 2, so that the next fallback is used. An update in chunks continues."""
    training = training_for(name)
    choice = choices_of(name, training)[-1]
    setup = setup_for(training, [name])._replace(dropout=0.0)  # other micro-batches draw other masks
    if not lossy_of((choice,)):
        setup = setup._replace(optimizer="sgd")
    first, second = configuration_of(choice), configuration_of(choice, samples=BATCH_SIZE // 2)
    if conflict_among(second, setup.workload(), setup.setting()) is not None:  # the technique needs the whole batch
        second = configuration_of(samples=BATCH_SIZE // 2)
    fallbacks = (configuration_of(WHOLE), first) if name == "micro_batch" else (first, second)
    with armed(phase, 2, 3):
        found = trained(setup, *fallbacks)
    assert {event.phase for event in found.events} <= ({phase, "backward"} if phase == "optimizer" else {phase})
    assert found.events or phase == "optimizer"
    numerics = max(numerics_of((choice,)), "reordered", key=STRICTEST_FIRST.index)
    require_the_same(found, expected_of(setup, *fallbacks), numerics, is_lossy=bool(lossy_of((choice,))))


# -- a dry run allocates what a run does -----------------------------------------------------------------------------


def live_peak_bytes(setup: Setup, fallback: tuple[Choice, ...], is_real: bool) -> int:
    position = Position()
    model, optimizer = setup.fresh()
    options: dict[str, Any] = {"units": setup.case.units, "clip_norm": setup.clip_norm, "fallbacks": [fallback]}
    options["position"] = position
    batch = {name: tensor.clone() for name, tensor in setup.case.batches()[0].items()}  # not a view of the epoch
    if not is_real:
        with _stage(CpuLowering(), position, keeps_all=True) as stage:
            fake_model, fake_optimizer = stage.fake_training(model, optimizer)
            stage.recorder.know_model(fake_model)
            step = TrainStep(fake_model, fake_optimizer, backend=StageBackend("cpu"), **options)
            stage.recorder.know_model(step.workload.model)
            for number in (1, 2):
                stage.recorder.step = number
                step(stage.fake_batch(batch))
                stage.recorder.know_optimizer(step.workload.optimizer)
        step.close()
        return live_bytes(stage.trace()).peak_bytes
    recorder = Recorder(phase=lambda: "copy" if position.phase == "fetch" else position.phase)
    with recorder:
        recorder.know_model(model)
        recorder.know(batch.items(), "inputs")
        step = TrainStep(model, optimizer, recut_loss=True, **options)  # no rows are compared
        recorder.know_model(step.workload.model)
        for number in (1, 2):
            recorder.step = number
            step(batch)
            recorder.know_optimizer(step.workload.optimizer)
    step.close()
    return live_bytes(recorder.trace("measured", "cpu")).peak_bytes


@cache
def plain_peak_bytes(setup: Setup) -> int:
    return live_peak_bytes(setup, configuration_of(WHOLE), is_real=True)


@pytest.mark.sampled(12)
@every_technique
@every_training
def test_a_dry_run_with_it_needs_what_a_run_with_it_needs(name, training):
    choices = choices_of(name, training)
    fallback = configuration_of(
        choices[1] if name == "micro_batch" else choices[-1]
    )  # a pass of one sample is tried 8 times
    setup = setup_for(training, [name])._replace(dropout=0.0)
    predicted_bytes, measured_bytes = (live_peak_bytes(setup, fallback, is_real) for is_real in (False, True))
    most_more = COPIED_HEAD_BYTES if (name, training) == ("lora", "bert") else 0
    most_more += ALL_RARE_BYTES if name == "adaptive_softmax" else 0
    if training in UNSEEN_SHARE:
        most_more += int(UNSEEN_SHARE[training] * max(plain_peak_bytes(setup), measured_bytes))
    assert 0 <= predicted_bytes - measured_bytes <= most_more


@pytest.mark.parametrize("name", sorted(one.name for one in TECHNIQUES.values() if one.only_in))
def test_what_acts_in_one_part_of_a_training_changes_no_other(name):
    one = Job.from_fields(
        {
            "model": {"architecture": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2}, "evaluate_every": 1,
            "data": {"train": "nowhere.txt", "validation": 0.1}, "sequence_length": 16, "batch_size": 4,
        }
    )  # fmt: skip
    texts = TextSketch(vocab_size=300, num_labels=None, end_id=0)
    choices = {"evaluation": {"samples": 1}, "optimizer_kernel": {"kernel": "fused"}}
    traces = [
        dry_run_job(one, texts, CpuLowering(), (micro_batch_choice(4), *others))
        for others in ((), (Choice(technique=name, options=choices[name]),))
    ]
    phases = TECHNIQUES[name].only_in
    outside, inside = ([ops_of(trace, phases, is_inside) for trace in traces] for is_inside in (False, True))
    assert outside[0] == outside[1]
    assert inside[0] != inside[1]


def ops_of(trace, phases, is_inside):
    ops = trace.ops
    columns = (ops.phase, ops.name, ops.moved_bytes, ops.flops, ops.outside_bytes)
    rows = [(phase, trace.texts[text], *rest) for phase, text, *rest in zip(*columns, strict=True)]
    return [row for row in rows if (row[0] in phases) == is_inside]
