"""A carried state in the step's transaction: bitwise equal to a plain loop that carries and detaches by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plain_streams import PlainLanguageModel, plain_streams
from plimsoll.data.batches.loader import Loader
from plimsoll.data.samples.stream_slots import StreamSlots
from plimsoll.data.samples.streams import StreamDataset
from plimsoll.models.names import RECURRENT
from plimsoll.models.recurrent.model import RecurrentLanguageModel, build_recurrent
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.step.update.commit import StepCommit
from plimsoll.techniques import TECHNIQUES, Setting, technique_of
from processor import skip_without_half_lstm
from token_stores import store_of_lengths
from workloads import largest_relative_difference, weights_of

NUM_SLOTS, LENGTH, VOCABULARY = 6, 8, 50
TEXT_LENGTHS = [
    40,
    3,
    25,
    1,
    60,
    17,
    90,
    33,
    8,
    51,
    12,
    70,
]  # 422 tokens with the end tokens: 10 windows per stream slot
NUM_STEPS = 13  # into the second epoch, and past a shorter window
PHASES = ("copy", "forward", "loss", "backward", "clip", "optimizer")
CLOSE = 1e-5


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory):
    return store_of_lengths(tmp_path_factory.mktemp("tokens"), TEXT_LENGTHS, VOCABULARY)


def dataset_of(store, resets: bool = False) -> StreamDataset:
    return StreamDataset(store, StreamSlots(0, len(store.tokens), NUM_SLOTS, LENGTH), resets)


def ours(architecture: str, dropout: float = 0.0, vocab_size: int = VOCABULARY) -> RecurrentLanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab_size, "embedding_size": 16, "hidden_size": 16, "num_layers": 2, "dropout": dropout}
    model = build_recurrent({"architecture": architecture, **sizes})
    assert isinstance(model, RecurrentLanguageModel)
    model.carry(NUM_SLOTS)
    torch.manual_seed(1)
    return model.train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step_of(model: RecurrentLanguageModel, **options) -> TrainStep:
    return TrainStep(model, adamw(model), units="next-tokens", clip_norm=1.0, **options)


def plain(
    architecture: str,
    store,
    dropout: float = 0.0,
    resets: bool = False,
    num_steps: int = NUM_STEPS,
    cut: int = NUM_SLOTS,
) -> dict[str, Tensor]:
    model = PlainLanguageModel(architecture, VOCABULARY, 16, dropout=dropout).train()
    weights = ours(architecture, dropout).state_dict()
    model.load_state_dict({name: weight for name, weight in weights.items() if "carried" not in name})
    optimizer = adamw(model)
    begins = frozenset((store.ends + 1).tolist()) if resets else frozenset()
    plain_streams(
        model, optimizer, torch.from_numpy(store.tokens.astype("int64")), num_slots=NUM_SLOTS, length=LENGTH,
        num_steps=num_steps, text_begins=begins, cut=cut,
    )  # fmt: skip
    return weights_of(model, optimizer)


def run(step: TrainStep, loader: Loader, num_steps: int = NUM_STEPS) -> list[int]:
    sizes = []
    for _ in range(num_steps):
        sizes.append(step(loader.peek().fields).micro_batch)
        loader.advance()
    return sizes


def learned(step: TrainStep) -> dict[str, Tensor]:
    found = weights_of(step.workload.model, step.workload.optimizer)
    return {name: tensor for name, tensor in found.items() if "carried" not in name}


def loader_of(store, resets: bool = False) -> Loader:
    return Loader(dataset_of(store, resets), NUM_SLOTS, shuffle=False)


@pytest.mark.parametrize("resets", [False, True], ids=["on", "reset"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("architecture", RECURRENT)
def test_the_weights_are_those_of_the_plain_loop_bit_by_bit(store, architecture, dropout, resets):
    step = step_of(ours(architecture, dropout))
    assert run(step, loader_of(store, resets)) == [NUM_SLOTS] * NUM_STEPS
    expected = plain(architecture, store, dropout, resets)
    assert largest_relative_difference(expected, learned(step)) == 0


def test_without_its_state_the_training_is_another(store):
    step = step_of(ours("lstm"))
    for batch in iterated(loader_of(store), 4):
        step({"input_ids": batch["input_ids"], "labels": batch["labels"]})
    expected = plain("lstm", store, num_steps=4)
    assert largest_relative_difference(expected, learned(step)) > CLOSE


def iterated(loader: Loader, num_steps: int):
    for _ in range(num_steps):
        yield loader.peek().fields
        loader.advance()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("resets", [False, True], ids=["on", "reset"])
@pytest.mark.parametrize("cut", [1, 2, 4, 5])
@pytest.mark.parametrize("architecture", RECURRENT)
def test_micro_batches_carry_the_state_of_their_stream_slots(store, architecture, cut, resets):
    step = step_of(ours(architecture), micro_batch=cut)
    assert run(step, loader_of(store, resets)) == [cut] * NUM_STEPS
    expected = plain(architecture, store, resets=resets, cut=cut)
    assert largest_relative_difference(expected, learned(step)) < CLOSE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("at_step", [1, 4, 11])
@pytest.mark.parametrize("phase", PHASES)
def test_an_oom_in_any_phase_loses_nothing_and_carries_nothing_twice(store, phase, at_step):
    """A step that has fitted is repeated whole, bit by bit. The first step is split, unless it failed in the update."""
    step = step_of(ours("lstm", dropout=0.2))
    step._commit = StepCommit(step.workload.optimizer, step.backend, step.position, 1)
    num_pieces = len(list(step.workload.model.parameters()))
    hit = {"optimizer": (at_step - 1) * num_pieces + num_pieces // 2}.get(phase, at_step)
    num_steps = at_step + 2  # after three clean steps the whole batch is used again
    with armed(phase, hit):
        cuts = run(step, loader_of(store), num_steps)
    undisturbed = step_of(ours("lstm", dropout=0.2), micro_batch=cuts[0])
    run(undisturbed, loader_of(store), num_steps)
    assert len(set(cuts)) == 1
    assert cuts[0] == (NUM_SLOTS // 2 if at_step == 1 and phase != "optimizer" else NUM_SLOTS)
    assert largest_relative_difference(learned(undisturbed), learned(step)) == 0
    assert torch.equal(*(one.workload.model.carried.training_state for one in (step, undisturbed)))


@pytest.mark.parametrize("hit", [2, 3, 9])
def test_an_oom_in_the_middle_of_a_cut_step_carries_no_stream_slot_twice(store, hit):
    """Stream slots that were read before the error have advanced, and are read again."""
    model = ours("gru")
    step, other = step_of(model, micro_batch=2), step_of(ours("gru"), micro_batch=2)
    with armed("forward", hit):
        run(step, loader_of(store))
    run(other, loader_of(store))
    assert largest_relative_difference(learned(other), learned(step)) < CLOSE


def test_an_evaluation_that_runs_out_of_memory_reads_its_stream_slots_again(store):
    step = step_of(ours("lstm"))
    run(step, loader_of(store), 2)
    state = step.workload.model.carried.training_state.clone()
    batches = list(iterated(loader_of(store), 10))
    expected = step.evaluate(batches)
    with armed("evaluation", 4):
        found = step.evaluate(batches)
    assert len(found.oom_events) == 1
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.num_units == expected.num_units == 70 * NUM_SLOTS
    assert torch.equal(step.workload.model.carried.training_state, state)


@pytest.mark.parametrize("precision", ["bf16"])
def test_autocast_carries_the_state_in_the_dtype_of_the_layers(store, precision):
    model = ours("lstm")
    skip_without_half_lstm(model)
    losses = [step_of(model, precision=precision)(fields).loss for fields in iterated(loader_of(store), 3)]
    assert model.carried.training_state.dtype == torch.float32
    assert all(loss > 0 for loss in losses)


def step_with(*choices: Choice) -> TrainStep:
    """Return a step with a head large enough for chunks, and SGD, because Adam may divide by rounding errors."""
    model = ours("lstm", vocab_size=1024)
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), units="next-tokens", fallbacks=[choices])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [name for name in TECHNIQUES if technique_of(name).numerics in {"bitwise", "reordered"}]
)
def test_with_a_technique_the_state_is_carried_as_without(store, name):
    whole = micro_batch_choice(NUM_SLOTS)
    available = technique_of(name).choices(step_with(whole).workload, Setting("cpu", NUM_SLOTS))
    if isinstance(available, str):
        pytest.skip(available)
    for choice in {available[0], available[-1]}:
        trainings = []
        for choices in ((whole,), (choice,) if name == "micro_batch" else (whole, choice)):
            step = step_with(*choices)
            run(step, loader_of(store, resets=True))
            step.close()
            trainings.append(step.workload.model.state_dict())
        assert trainings[0].keys() == trainings[1].keys()
        assert largest_relative_difference(*trainings) < CLOSE
