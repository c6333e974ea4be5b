"""Small trainings for the contract of techniques, in which a technique has an effect, and their comparison.

Trainings have dropout if the bits must be equal, and none if another order of samples would draw other masks. Trainings
that are compared with a tolerance use SGD, because Adam divides by gradients that are only rounding errors. Lossy
techniques replace Adam and therefore use Adam; combined with others, each is compared with itself alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.micro_batches import autocast
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, conflict_among, in_order, installed, technique_of
from workloads import (
    BATCH_SIZE,
    CASES,
    LENGTH,
    NUM_SAMPLES,
    VOCABULARY,
    Case,
    classes,
    largest_relative_difference,
    plain_loop,
    text,
    weights_of,
)

NUM_STEPS = 3
STRICTEST_FIRST = ("bitwise", "reordered", "reduced precision", "lossy")
TOLERANCES = {"bitwise": 0.0, "reordered": 1e-5, "reduced precision": 2e-2}
LARGE_VOCABULARY = 1024
WHOLE = micro_batch_choice(BATCH_SIZE)


# -- models and data ---------------------------------------------------------------------------------------------------


def t5(dropout: float = 0.1) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=dropout, decoder_start_token_id=0))


def gpt2(dropout: float = 0.1) -> nn.Module:
    """Build a GPT-2 with a vocabulary that is large relative to its width, as some techniques require."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": LARGE_VOCABULARY, "n_positions": LENGTH}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **ends, use_cache=False, loss_type="ForCausalLMLoss"))


def recurrent(dropout: float = 0.1) -> nn.Module:
    """Build our LSTM with a vocabulary that is large relative to its width."""
    fields = {"architecture": "lstm", "vocab_size": LARGE_VOCABULARY, "embedding_size": 16, "hidden_size": 32}
    return build_recurrent(fields | {"dropout": dropout})


def tagger(dropout: float = 0.1) -> nn.Module:
    """Build our tagger, which packs its texts."""
    fields = {"architecture": "lstm", "vocab_size": VOCABULARY, "embedding_size": 16, "hidden_size": 16}
    return build_recurrent(
        fields | {"is_tagger": True, "bidirectional": True, "num_layers": 2, "num_labels": 3, "dropout": dropout}
    )


def rare_text() -> dict[str, Tensor]:
    """Return the usual text with words from all over the large vocabulary."""
    data = text()
    largest = (LARGE_VOCABULARY - 1) // VOCABULARY
    return {name: torch.where(value < 0, value, value * largest) for name, value in data.items()}


def mask_of_lengths(longest: int = LENGTH) -> Tensor:
    """Return the mask of texts of 3 or more tokens, padded on the right."""
    mask = torch.ones(NUM_SAMPLES, longest, dtype=torch.long)
    for sample in range(NUM_SAMPLES):
        mask[sample, longest - sample % (longest - 2) :] = 0
    return mask


def padded(longest: int = LENGTH) -> dict[str, Tensor]:
    """Return texts of different lengths, and their copies as labels."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, VOCABULARY, (NUM_SAMPLES, longest), generator=generator)
    mask = mask_of_lengths(longest)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def padded_classes() -> dict[str, Tensor]:
    """Return texts of different lengths, each with its class."""
    data = classes()
    return {**data, "input_ids": data["input_ids"] * mask_of_lengths(), "attention_mask": mask_of_lengths()}


def tagged() -> dict[str, Tensor]:
    """Return short tagged texts of different lengths; a layer that packs them has ops for each position."""
    data = padded(longest=7)
    return {**data, "labels": torch.where(data["labels"] >= 0, data["labels"] % 3, -100)}


TRAININGS = {
    case.name: case
    for case in (
        replace(CASES[0], build=gpt2),
        *CASES[1:],
        Case("t5", t5, padded, "tokens"),
        Case("recurrent", recurrent, rare_text, "next-tokens"),
        Case("tagger", tagger, tagged, "tokens"),
    )
}
PADDED = {"gpt2": padded, "bert": padded_classes}


class Setup(NamedTuple):
    """The settings of a training of `TRAININGS`."""

    training: str
    dropout: float
    optimizer: str
    clip_norm: float | None
    is_eager: bool
    is_padded: bool

    @property
    def case(self) -> Case:
        case = TRAININGS[self.training]
        return replace(case, data=PADDED[self.training]) if self.is_padded else case

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(_built(self.training, self.dropout, self.is_eager)).train()
        torch.manual_seed(1)
        if self.optimizer == "adamw":
            return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def workload(self) -> Workload:
        return Workload(*self.fresh(), model_loss, self.case.units, clip_norm=self.clip_norm)

    def setting(self) -> Setting:
        allow = frozenset(name for name, technique in TECHNIQUES.items() if technique.numerics == "lossy")
        lengths_vary = "attention_mask" in self.case.data()
        return Setting("cpu", BATCH_SIZE, precision="auto", allow=allow, lengths_vary=lengths_vary)

    def step(self, fallbacks: Iterable[tuple[Choice, ...]], **options: Any) -> TrainStep:
        model, optimizer = self.fresh()
        fallbacks = tuple(fallbacks)
        given = {"units": self.case.units, "clip_norm": self.clip_norm, "grow_after": 10**9}
        return TrainStep(model, optimizer, fallbacks=fallbacks, **given | options)

    def plain_loop(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
        return plain_loop(self.case, model, optimizer, [BATCH_SIZE] * num_steps, self.clip_norm)


@cache
def _built(training: str, dropout: float, is_eager: bool) -> nn.Module:
    torch.manual_seed(0)
    model = TRAININGS[training].build(dropout=dropout)
    if is_eager:
        model.set_attn_implementation("eager")
    return model


def setup_for(training: str, names: Iterable[str]) -> Setup:
    """Return settings in which techniques have an effect: eager attention, padded texts, no clipping."""
    names = set(names)
    exact = _weakest(name for name in names if technique_of(name).numerics != "lossy")
    return Setup(
        training,
        dropout=0.1 if exact == "bitwise" else 0.0,
        optimizer="adamw" if exact == "bitwise" or _weakest(names) == "lossy" else "sgd",
        clip_norm=None if any(_needs_no_clipping(name, training) for name in names) else 1.0,
        is_eager="attention" in names and training in {"gpt2", "bert", "t5"},
        is_padded="by_length" in names and training in PADDED,
    )


def _weakest(names: Iterable[str]) -> str:
    return max((technique_of(name).numerics for name in names), key=STRICTEST_FIRST.index, default="bitwise")


@cache
def _needs_no_clipping(name: str, training: str) -> bool:
    workload = Workload(*TRAININGS[training].fresh(), model_loss, TRAININGS[training].units, clip_norm=1.0)
    setting = Setting("cpu", BATCH_SIZE)
    if not isinstance(technique_of(name).choices(workload, setting), str):
        return False
    workload.clip_norm = None
    return not isinstance(technique_of(name).choices(workload, setting), str)


# -- choices -----------------------------------------------------------------------------------------------------------


@cache
def available_choices(name: str, training: str) -> tuple[Choice, ...] | str:
    """Return up to three choices, the first, second and last, or the reason why no choice is available."""
    setup = setup_for(training, [name])
    workload, setting = setup.workload(), setup.setting()
    available = technique_of(name).choices(workload, setting)
    if isinstance(available, str):
        assert available, "a reason is a sentence"
        return available
    assert available, "no choices and no reason"
    for choice in available:
        assert choice.technique == name
        assert conflict_among((choice,), workload, setting) is None, "the choices have what the workload forbids"
    return tuple(dict.fromkeys((*available[:2], available[-1])))


def choices_of(name: str, training: str) -> tuple[Choice, ...]:
    available = available_choices(name, training)
    if isinstance(available, str):
        pytest.skip(available)
    return available


def setup_of(training: str, choices: tuple[Choice, ...]) -> Setup:
    """Return the settings for some choices; a choice of the whole batch changes nothing."""
    return setup_for(training, (choice.technique for choice in choices if choice != WHOLE))


def numerics_of(choices: tuple[Choice, ...]) -> str:
    """Return the weakest numerics of the choices that are not lossy."""
    names = (choice.technique for choice in choices if choice != WHOLE)
    return _weakest(name for name in names if technique_of(name).numerics != "lossy")


def lossy_of(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    return tuple(choice for choice in choices if technique_of(choice.technique).numerics == "lossy")


def configuration_of(*choices: Choice, samples: int = BATCH_SIZE) -> tuple[Choice, ...]:
    """Return the choices with a micro-batch, unless they already contain one."""
    cuts = any(choice.technique == "micro_batch" for choice in choices)
    return in_order(choices if cuts else (*choices, micro_batch_choice(samples)))


# -- trained and compared ----------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]
    events: list[Any]


@cache
def expected_of(setup: Setup, *fallbacks: tuple[Choice, ...]) -> Trained:
    """Train in plain PyTorch, or with fallbacks without running out of memory."""
    if fallbacks:
        return trained(setup, *fallbacks)
    model, optimizer = setup.fresh()
    losses = setup.plain_loop(model, optimizer, NUM_STEPS)
    return Trained(losses, weights_of(model, optimizer), [])


def expected_with(setup: Setup, choices: tuple[Choice, ...]) -> Trained:
    """Return the expected results of choices: plain PyTorch, with the lossy ones among them."""
    lossy = lossy_of(choices)
    return expected_of(setup, configuration_of(*lossy)) if lossy else expected_of(setup)


def trained(setup: Setup, *fallbacks: tuple[Choice, ...]) -> Trained:
    step = setup.step(fallbacks)
    results = [step(batch) for batch in setup.case.batches()[:NUM_STEPS]]
    weights = weights_of(step.workload.model, step.workload.optimizer)
    step.close()
    assert [(result.step, result.num_samples) for result in results] == [(n + 1, BATCH_SIZE) for n in range(NUM_STEPS)]
    events = [event for result in results for event in result.oom_events]
    return Trained([result.loss for result in results], weights, events)


def require_the_same(found: Trained, expected: Trained, numerics: str, is_lossy: bool = False) -> None:
    """Check that results are as close as the numerics promise; replacements of Adam divide by rounding errors as Adam
    does.
    """
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCES[numerics], abs=0.0)
    if numerics == "bitwise":
        assert found.weights.keys() == expected.weights.keys()
        assert [n for n, one in expected.weights.items() if not torch.equal(one, found.weights[n])] == []
    elif numerics == "reduced precision" or is_lossy:
        assert relative_distance(found.weights, expected.weights) < (0.2 if is_lossy else TOLERANCES[numerics])
    else:
        assert largest_relative_difference(expected.weights, found.weights) <= TOLERANCES[numerics]


def relative_distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the distance of all tensors as one vector: elements near 0 have no exact digits in half precision."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    return (apart / sum(float(tensor.double().square().sum()) for tensor in expected.values())) ** 0.5


Gradients = tuple[float, dict[str, Tensor]]


def loss_and_gradients(workload: Workload, batch: dict[str, Tensor]) -> Gradients:
    torch.manual_seed(2)
    with autocast(workload):
        loss = workload.loss(workload.model, batch)
    loss.backward()
    named = workload.model.named_parameters()
    return loss.item(), {name: one.grad.clone() for name, one in named if one.grad is not None}


@cache
def expected_gradients(setup: Setup, lossy: tuple[Choice, ...]) -> Gradients:
    """Return the gradients of plain PyTorch with the lossy choices, after a step."""
    workload = setup.workload()
    setup.plain_loop(workload.model, workload.optimizer, 1)
    workload.optimizer.zero_grad()
    torch.manual_seed(3)
    with installed(workload, lossy):
        return loss_and_gradients(workload, setup.case.batches()[0])


def require_the_same_gradients(found: Gradients, expected: Gradients, numerics: str) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCES[numerics], abs=0.0)
    if numerics == "reduced precision":  # a maximum over positions may select another position
        assert relative_distance(found[1], expected[1]) < 0.1
    else:
        assert largest_relative_difference(expected[1], found[1]) <= TOLERANCES[numerics]


# -- restored ----------------------------------------------------------------------------------------------------------


def require_restored(training: str, choices: tuple[Choice, ...]) -> Gradients:
    """Check that a technique restores the workload, without and with a use; both after a step that creates the states.

    Returns:
        loss and gradients of the use.
    """
    setup = setup_of(training, choices)
    workload = setup.workload()
    setup.plain_loop(workload.model, workload.optimizer, 1)
    workload.optimizer.zero_grad()
    before, numbers = shape_of(workload), weights_of(workload.model, workload.optimizer)
    with installed(workload, choices):
        if not lossy_of(choices):  # a checkpoint may be written here
            assert list(workload.model.state_dict()) == before["state dict"]
    assert differing(before, shape_of(workload)) == []
    after = weights_of(workload.model, workload.optimizer)
    assert numbers.keys() == after.keys()
    assert [name for name in numbers if not torch.equal(numbers[name], after[name])] == []
    torch.manual_seed(3)
    with installed(workload, choices):
        found = loss_and_gradients(workload, setup.case.batches()[0])
        for parameters in (workload.model.parameters(), *(g["params"] for g in workload.optimizer.param_groups)):
            for parameter in parameters:
                parameter.grad = None
    assert differing(before, shape_of(workload)) == []
    return found


def shape_of(workload: Workload) -> dict[str, Any]:
    """Return everything of a workload except the numbers, by identity; compared objects are kept alive."""
    found: dict[str, Any] = {}
    for name, module in workload.model.named_modules():
        found[f"{name} is"] = type(module)
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = Same(tuple(value.items()) if isinstance(value, dict) else (value,))
    for name, one in workload.model.state_dict(keep_vars=True).items():
        found[f"tensor {name}"] = Same((one, str(one.dtype), one.requires_grad, tuple(one.stride()), one.device.type))
    optimizer = workload.optimizer
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            found[f"optimizer.{key}"] = Same(tuple(value.items()))
    found["optimizer attributes"] = sorted(vars(optimizer))
    found["state"] = Same(tuple((parameter, *state) for parameter, state in optimizer.state.items()))
    found["state dict"] = list(workload.model.state_dict())
    for number, group in enumerate(optimizer.param_groups):
        found[f"group {number}"] = Same(tuple(group["params"])), {k: v for k, v in group.items() if k != "params"}
    own = [field.name for field in fields(workload) if field.name != "hooks"]
    found["workload"] = Same(tuple(getattr(workload, name) for name in own))
    found["hooks"] = Same(tuple(getattr(workload.hooks, field.name) for field in fields(workload.hooks)))
    if hasattr(workload.model, "config"):
        config = workload.model.config
        found["config"] = config.to_dict() if hasattr(config, "to_dict") else config
    return found


class Same:
    """Equal to an object that holds the same objects in the same order; numbers and texts are compared by value."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or len(self.values) != len(other.values):
            return False
        return all(map(_is_same, self.values, other.values))

    __hash__ = None  # type: ignore[assignment]  # never kept in a set

    def __repr__(self) -> str:
        return repr(self.values)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (isinstance(one, bool | int | float | str | type(None)) and one == other)


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
