"""A `Trainer` under the adapter against the plain one: same steps, losses and weights, whatever runs out of memory.

The scenario of `auto_find_batch_size` is among them: memory runs out at batch 5 of 8, and each of 64 samples must have
been trained once.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import run_program
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

import plimsoll
from plimsoll.errors import BudgetError, InputError, OutOfMemoryError
from plimsoll.records.run import OomEvent
from plimsoll.run.failpoints import armed, exhaust_memory

NUM_SAMPLES, BATCH_SAMPLES, LENGTH, NUM_WORDS = 64, 8, 16, 50


def language_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"))
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=NUM_WORDS, n_positions=LENGTH, **drops, **ids)
    )


def classifier(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=NUM_WORDS,
            num_labels=3,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )  # fmt: skip
    return BertForSequenceClassification(config)


def samples(model: nn.Module) -> list[dict[str, Tensor]]:
    """Texts of unequal length: a mean of the means of pieces would be another loss."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(NUM_SAMPLES):
        ids = torch.randint(0, NUM_WORDS, (LENGTH,), generator=generator)
        if isinstance(model, GPT2LMHeadModel):
            labels = ids.clone()
            labels[int(torch.randint(4, LENGTH, (1,), generator=generator)) :] = -100
        else:
            labels = torch.randint(0, 3, (), generator=generator)
        made.append({"input_ids": ids, "labels": labels})
    return made


def trainer_of(model: nn.Module, folder: Path, cls: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    data = samples(model)
    plain: dict[str, Any] = {
        "per_device_train_batch_size": BATCH_SAMPLES, "num_train_epochs": 1, "report_to": [], "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        # Adam would make an update of the rounding of gradients that are zero but for it.
        "learning_rate": 0.1, "optim": "sgd",
    }  # fmt: skip
    return cls(model, TrainingArguments(str(folder), **plain | arguments), train_dataset=data, eval_dataset=data[:10])


@contextmanager
def short_of_memory(model: nn.Module, passes: Sequence[int], seen: Counter[tuple[int, ...]]) -> Iterator[None]:
    """Let memory run out in the given forward passes of training, and count the samples of the others."""
    num_passes = 0

    def before(module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        nonlocal num_passes
        if not torch.is_grad_enabled():
            return
        num_passes += 1
        if num_passes in passes:
            exhaust_memory()
        seen.update(tuple(row) for row in options["input_ids"].tolist())

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def losses_of(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def assert_alike(one: Trainer, other: Trainer) -> None:
    assert one.state.global_step == other.state.global_step
    torch.testing.assert_close(losses_of(one), losses_of(other), atol=1e-5, rtol=0)
    assert one.model is not None
    assert other.model is not None
    expected = other.model.state_dict()
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


def test_memory_that_runs_out_at_batch_5_of_8_costs_no_sample_and_repeats_none(tmp_path: Path):
    """Where `auto_find_batch_size` trains 32 of 64 samples twice."""
    undisturbed = trainer_of(language_model(), tmp_path / "a")
    undisturbed.train()
    trainer, seen = trainer_of(language_model(), tmp_path / "b"), Counter[tuple[int, ...]]()
    events: list[OomEvent] = []
    assert trainer.model is not None
    with short_of_memory(trainer.model, [5, 6], seen):
        plimsoll.transformers.fit(trainer, on_oom=events.append)
    assert [(event.step, event.action) for event in events] == [
        (5, "same micro-batch once more"),
        (5, "micro-batch 8 -> 4"),
    ]
    assert sum(seen.values()) == NUM_SAMPLES
    assert set(seen.values()) == {1}
    assert_alike(trainer, undisturbed)


@pytest.mark.parametrize("make", [language_model, classifier])
@pytest.mark.parametrize("accumulated", [2, 3])
def test_a_window_of_batches_is_done_again_as_a_whole(tmp_path: Path, make, accumulated: int):
    undisturbed = trainer_of(make(), tmp_path / "a", gradient_accumulation_steps=accumulated)
    undisturbed.train()
    trainer = trainer_of(make(), tmp_path / "b", gradient_accumulation_steps=accumulated)
    assert trainer.model is not None
    with short_of_memory(trainer.model, [2, 3, 9, 11], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


def test_dropout_masks_are_drawn_again_where_the_batch_is_not_cut(tmp_path: Path):
    undisturbed = trainer_of(language_model(dropout=0.2), tmp_path / "a", gradient_accumulation_steps=2)
    undisturbed.train()
    trainer = trainer_of(language_model(dropout=0.2), tmp_path / "b", gradient_accumulation_steps=2)
    assert trainer.model is not None
    with short_of_memory(trainer.model, [4], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


@pytest.mark.parametrize(
    ("option", "value"), [("label_smoothing_factor", 0.1), ("average_tokens_across_devices", True)]
)
def test_other_ways_to_make_a_loss_are_cut_right(tmp_path: Path, option: str, value: Any):
    undisturbed = trainer_of(language_model(), tmp_path / "a", **{option: value})
    undisturbed.train()
    trainer = trainer_of(language_model(), tmp_path / "b", **{option: value})
    assert trainer.model is not None
    with short_of_memory(trainer.model, [1, 2, 3], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


class MeanLoss(Trainer):
    """A trainer of the kind there are many of: it takes the mean over the tokens of each batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, labels)
        return (loss, outputs) if return_outputs else loss


def test_a_trainer_that_divides_by_nothing_is_weighted_by_what_its_loss_averages_over(tmp_path: Path):
    undisturbed = trainer_of(language_model(), tmp_path / "a", MeanLoss, gradient_accumulation_steps=2)
    undisturbed.train()
    trainer = trainer_of(language_model(), tmp_path / "b", MeanLoss, gradient_accumulation_steps=2)
    assert trainer.model is not None
    with short_of_memory(trainer.model, [1, 2, 3], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
def test_an_update_that_runs_out_of_memory_happens_once(tmp_path: Path, optimizer: str):
    undisturbed = trainer_of(language_model(), tmp_path / "a", optim=optimizer, warmup_steps=2)
    undisturbed.train()
    trainer = trainer_of(language_model(), tmp_path / "b", optim=optimizer, warmup_steps=2)
    events: list[OomEvent] = []
    with armed("optimizer", 1, 4):
        plimsoll.transformers.fit(trainer, on_oom=events.append)
    assert [event.phase for event in events] == ["optimizer"] * 2
    assert_alike(trainer, undisturbed)


def test_a_run_that_was_saved_goes_on(tmp_path: Path):
    undisturbed = trainer_of(language_model(), tmp_path / "a")
    undisturbed.train()
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    first = trainer_of(language_model(), tmp_path / "b", **saving)
    first.add_callback(StopAfter(4))
    plimsoll.transformers.fit(first)
    second = trainer_of(language_model(), tmp_path / "b", **saving)
    assert second.model is not None
    with short_of_memory(second.model, [2, 3], Counter()):
        plimsoll.transformers.fit(second, resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert_alike(second, undisturbed)


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_an_evaluation_that_runs_out_of_memory_is_the_same(tmp_path: Path):
    for make in (language_model, classifier):
        trainer = trainer_of(make(), tmp_path / "a", per_device_eval_batch_size=10)
        expected = trainer.predict(trainer.eval_dataset)
        model = trainer.model
        assert model is not None
        num_passes = 0

        def fail_at_first(module: nn.Module, arguments: Any) -> None:
            nonlocal num_passes
            num_passes += 1
            if num_passes in {1, 2}:
                exhaust_memory()

        handle = model.register_forward_pre_hook(fail_at_first)
        with plimsoll.transformers.protected(trainer) as protection:
            found = trainer.predict(trainer.eval_dataset)
        handle.remove()
        assert [event.phase for event in protection.events] == ["evaluation"] * 2
        torch.testing.assert_close(found.predictions, expected.predictions, atol=1e-5, rtol=0)
        assert abs(found.metrics["test_loss"] - expected.metrics["test_loss"]) < 1e-5


def test_a_batch_that_never_fits_ends_with_the_step_undone(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    assert trainer.model is not None
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    seen: Counter[tuple[int, ...]] = Counter()
    with (
        short_of_memory(trainer.model, range(1, 100), seen),
        pytest.raises(OutOfMemoryError, match="micro-batch 1 is the smallest there is"),
    ):
        plimsoll.transformers.fit(trainer)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_the_trainer_is_as_it_was_afterwards(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    names = set(vars(trainer))
    plimsoll.transformers.fit(trainer)
    assert_unwrapped(trainer)
    assert names <= set(vars(trainer))
    trainer.train()  # and goes on without


def test_what_the_memory_did_is_in_the_trainers_own_log(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    plimsoll.transformers.fit(trainer)
    line = trainer.state.log_history[0]
    assert line["plimsoll/peak_bytes"] > 1 << 20
    assert (line["plimsoll/micro_batch"], line["plimsoll/oom"]) == (BATCH_SAMPLES, 0)


def test_batch_norm_is_not_cut(tmp_path: Path):
    model = classifier()
    model.norm = nn.BatchNorm1d(3)  # type: ignore[assignment]
    trainer = trainer_of(model, tmp_path)
    with (
        short_of_memory(model, [1, 2], Counter()),
        pytest.raises(OutOfMemoryError, match="was not cut, because BatchNorm's statistics depend on the cut"),
    ):
        plimsoll.transformers.fit(trainer)
    with short_of_memory(model, [1, 2], Counter()):
        plimsoll.transformers.fit(trainer, recut_batch_norm=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_n_gpu", 2, "DataParallel on 2 GPUs: one process copies the model"),
        ("deepspeed", "ds.json", "hands its steps to DeepSpeed"),
    ],
)
def test_what_is_not_covered_is_refused(tmp_path: Path, name: str, value: Any, words: str):
    trainer = trainer_of(language_model(), tmp_path)
    object.__setattr__(trainer.args, name, value)
    with pytest.raises(InputError, match=words):
        plimsoll.transformers.fit(trainer)


def test_a_trainer_of_another_kind_is_refused():
    class Other:
        def compute_loss(self) -> None: ...

    with pytest.raises(InputError, match="a Other has no training_step, prediction_step, log"):
        plimsoll.transformers.fit(Other())  # type: ignore[arg-type]


def test_a_budget_that_nothing_fits_says_which_would_do(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    with pytest.raises(BudgetError, match="MiB"):
        plimsoll.transformers.fit(trainer, budget="100MiB")


REAL = """
import sys, torch, plimsoll
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from test_integrations_transformers import trainer_of, language_model, losses_of
import test_integrations_transformers as here
here.LENGTH, here.NUM_WORDS = 128, 4000
trainer = trainer_of(language_model(), Path(sys.argv[3]), per_device_train_batch_size=32, max_steps=3)
backend = plimsoll.transformers.backend_for("cpu")
if sys.argv[4] == "limited":
    from plimsoll.device.limit import limited
    trainer.create_optimizer()
    with limited(backend.use().used_bytes + (120 << 20)):
        with plimsoll.transformers.protected(trainer) as protection:
            trainer.train()
    assert protection.events, "it was not short of memory"
else:
    trainer.train()
total = sum(float(tensor.double().abs().sum()) for tensor in trainer.model.state_dict().values())
print(*[round(loss, 5) for loss in losses_of(trainer)], round(total, 4))
"""


def test_memory_that_really_runs_out_changes_nothing(tmp_path: Path):
    """In a process whose allocator is limited: a batch of 32 rows of 128 words with 4,000 logits each does not fit."""
    here = Path(__file__).parent
    ends = [
        run_program(REAL, here, here.parents[2], tmp_path / name, name, CUDA_VISIBLE_DEVICES="")
        for name in ("plain", "limited")
    ]
    assert [end.returncode for end in ends] == [0, 0], ends[1].stderr
    found, expected = ([float(word) for word in end.stdout.splitlines()[-1].split()] for end in ends)
    assert found == pytest.approx(expected, rel=1e-5)


# -- trainers and data as users have them ------------------------------------------------------------------------------


class OwnStep(Trainer):
    """A trainer that writes its step out, and takes a field out of the batch."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        labels = inputs.pop("labels")
        logits = model(**self._prepare_inputs(inputs)).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        self.accelerator.backward(loss)
        return loss.detach()


class OwnBackward(OwnStep):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


def run_short(tmp_path: Path, passes: Sequence[int], cls: type[Trainer] = Trainer, **arguments: Any) -> list[Trainer]:
    """A trainer that is short of memory in some passes, and one that is not."""
    undisturbed = trainer_of(language_model(), tmp_path / "a", cls, **arguments)
    undisturbed.train()
    trainer = trainer_of(language_model(), tmp_path / "b", cls, **arguments)
    assert trainer.model is not None
    with short_of_memory(trainer.model, passes, Counter()):
        plimsoll.transformers.fit(trainer)
    return [trainer, undisturbed]


def test_a_trainer_with_a_step_of_its_own_is_cut_right(tmp_path: Path):
    assert_alike(*run_short(tmp_path, [2, 3, 4, 6], OwnStep))


def test_a_step_whose_pieces_cannot_be_weighted_is_refused_and_undone(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path, OwnBackward)
    assert trainer.model is not None
    with (
        short_of_memory(trainer.model, [1, 2], Counter()),
        pytest.raises(InputError, match=r"OwnBackward.training_step does not call self.accelerator.backward"),
    ):
        plimsoll.transformers.fit(trainer)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert "backward" not in vars(trainer.accelerator)


def test_a_last_window_of_fewer_batches(tmp_path: Path):
    """8 batches in windows of 3: the third has two."""
    for passes in ([2, 3], [10, 11], [8, 9]):
        trainer, undisturbed = run_short(tmp_path, passes, gradient_accumulation_steps=3, num_train_epochs=2)
        assert trainer.state.global_step == 6
        assert_alike(trainer, undisturbed)


def test_an_update_that_fails_is_done_with_gradients_that_are_clipped_again(tmp_path: Path):
    class Called(TrainerCallback):
        times = 0

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.times += 1

    settings: dict[str, Any] = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}
    undisturbed = trainer_of(language_model(), tmp_path / "a", **settings)
    undisturbed.train()
    trainer, called = trainer_of(language_model(), tmp_path / "b", **settings), Called()
    trainer.add_callback(called)
    with armed("optimizer", *range(1, 8)), plimsoll.transformers.protected(trainer) as protection:
        trainer.train()
    assert {event.phase for event in protection.events} == {"optimizer"}
    assert called.times == 5  # 4 updates, of which the first did not even fit parameter by parameter
    assert_alike(trainer, undisturbed)


class Unlabelled(nn.Module):
    """A model that needs no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(input_ids) - input_ids).square().mean()}


@pytest.mark.parametrize("units", [None, "samples"])
def test_a_collator_without_labels_is_cut_only_where_units_are_given(tmp_path: Path, units: Any):
    torch.manual_seed(0)
    data = [{"input_ids": torch.randn(4)} for _ in range(12)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, optim="sgd", logging_steps=1,
    )  # fmt: skip
    first = Unlabelled()
    trainers = [Trainer(copy.deepcopy(first), arguments, train_dataset=data) for _ in range(2)]
    trainers[1].train()
    assert trainers[0].model is not None
    with short_of_memory(trainers[0].model, [2, 3], Counter()):
        if units is None:
            with pytest.raises(InputError, match=r"has no labels \(it has input_ids\).*units="):
                plimsoll.transformers.fit(trainers[0])
        else:
            plimsoll.transformers.fit(trainers[0], units=units)
            assert_alike(*trainers)


class Stream(torch.utils.data.IterableDataset):
    """Texts that can be read once, and not be counted."""

    def __init__(self, data: list[dict[str, Tensor]]) -> None:
        self.left = iter(data)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.left


def streaming(folder: Path) -> Trainer:
    trainer = trainer_of(language_model(), folder, max_steps=4, gradient_accumulation_steps=2)
    trainer.train_dataset = Stream(samples(language_model()))
    return trainer


def test_a_stream_is_read_once(tmp_path: Path):
    undisturbed, trainer = streaming(tmp_path / "a"), streaming(tmp_path / "b")
    undisturbed.train()
    assert trainer.model is not None
    with pytest.raises(InputError, match="a Stream, has no length"):
        plimsoll.transformers.fit(trainer, budget="4GiB")
    with short_of_memory(trainer.model, [8, 9], Counter()):
        plimsoll.transformers.fit(trainer)
    assert_alike(trainer, undisturbed)


def test_a_batch_in_which_nothing_is_to_be_learned_is_done_as_the_trainer_does(tmp_path: Path):
    trainers = [trainer_of(language_model(), tmp_path / name, gradient_accumulation_steps=2) for name in "ab"]
    for trainer in trainers:
        for sample in trainer.train_dataset[:30]:  # type: ignore[index]
            sample["labels"] = torch.full((LENGTH,), -100)
    trainers[1].train()
    assert trainers[0].model is not None
    with short_of_memory(trainers[0].model, [1, 2, 5], Counter()):
        plimsoll.transformers.fit(trainers[0])
    assert_alike(*trainers)


def test_a_batch_that_cannot_be_cut_is_done_as_a_whole(tmp_path: Path):
    """Such as rows packed to one, with the places where they begin."""

    def packed(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        ids = torch.cat([row["input_ids"] for row in rows])[None]
        return {"input_ids": ids, "labels": ids, "num_items_of": torch.tensor([len(row["input_ids"]) for row in rows])}

    class Packed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs.pop("num_items_of")
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainers = []
    for name in "ab":
        trainer = trainer_of(
            language_model(), tmp_path / name, Packed, per_device_train_batch_size=1, remove_unused_columns=False
        )
        trainer.data_collator = packed
        trainer.args.per_device_train_batch_size = trainer._train_batch_size = 1
        trainers.append(trainer)
    trainers[1].train()
    assert trainers[0].model is not None
    with short_of_memory(trainers[0].model, [5], Counter()):
        plimsoll.transformers.fit(trainers[0])
    assert_alike(*trainers)


def test_bf16_on_a_processor(tmp_path: Path):
    trainer, undisturbed = run_short(tmp_path, [2], bf16=True)  # the same cut: bf16 rounds every other cut otherwise
    assert_alike(trainer, undisturbed)


def test_a_model_that_is_made_when_training_begins(tmp_path: Path):
    """And again for each training in the block."""
    arguments = trainer_of(language_model(), tmp_path).args
    data = samples(language_model())
    trainers = [Trainer(args=arguments, train_dataset=data, model_init=lambda: language_model()) for _ in range(2)]
    for _ in range(2):
        trainers[1].train()
    with plimsoll.transformers.protected(trainers[0]) as protection:
        for _ in range(2):
            with armed("backward", 3):
                trainers[0].train()
    assert len(protection.events) == 2
    assert_alike(*trainers)


def test_auto_find_batch_size_has_nothing_to_find(tmp_path: Path):
    trainer, undisturbed = run_short(tmp_path, [5, 6], auto_find_batch_size=True)
    assert trainer.state.train_batch_size == BATCH_SAMPLES
    assert_alike(trainer, undisturbed)


def test_what_nothing_survives_does_not_begin_anew_with_another_batch_size(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path, auto_find_batch_size=True)
    assert trainer.model is not None
    with (
        short_of_memory(trainer.model, range(3, 1000), seen := Counter[tuple[int, ...]]()),
        pytest.raises(OutOfMemoryError, match="smallest there is"),
    ):
        plimsoll.transformers.fit(trainer)
    assert max(seen.values()) == 1
    assert trainer.state.train_batch_size == BATCH_SAMPLES


def test_a_callback_that_stops_within_a_window(tmp_path: Path):
    """And a second training in the same block, which begins with no gradients."""

    class StopEarly(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    trainers = [trainer_of(language_model(), tmp_path / name, gradient_accumulation_steps=2) for name in "ab"]
    for trainer in trainers:
        trainer.add_callback(StopEarly)
    guards: list[Any] = [plimsoll.transformers.protected(trainers[0]), nullcontext()]
    for trainer, guard in zip(trainers, guards, strict=True):
        with guard:
            trainer.train()
            trainer.remove_callback(StopEarly)
            trainer.train()
    assert_alike(*trainers)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_step_is_undone_and_the_trainer_unwrapped(tmp_path: Path, error: type[BaseException]):
    trainer = trainer_of(language_model(), tmp_path, gradient_accumulation_steps=2)
    model = trainer.model
    assert model is not None
    num_passes = 0

    def interrupt(module: nn.Module, arguments: Any) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 4:
            raise error

    handle = model.register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        plimsoll.transformers.fit(trainer)
    handle.remove()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_unwrapped(trainer)
    trainer.train()
    assert trainer.state.global_step == 4


def assert_unwrapped(trainer: Trainer) -> None:
    wrapped = {"training_step", "compute_loss", "prediction_step", "log"}
    assert not wrapped & set(vars(trainer))
    assert "backward" not in vars(trainer.accelerator)
    assert not getattr(trainer.optimizer.step, "__qualname__", "").startswith("_Training")  # type: ignore[union-attr]


@pytest.mark.parametrize("optim", ["lomo", "adalomo"])
def test_updates_inside_backward_are_refused(tmp_path: Path, optim: str):
    trainer = trainer_of(language_model(), tmp_path)
    object.__setattr__(trainer.args, "optim", optim)
    with pytest.raises(InputError, match=f"optim={optim} updates the parameters inside backward"):
        plimsoll.transformers.fit(trainer)


def test_a_layer_wise_optimizer_is_refused_before_its_first_step(tmp_path: Path):
    trainer = trainer_of(language_model(), tmp_path)
    trainer.optimizer = LayerWiseDummyOptimizer()
    assert trainer.model is not None
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(InputError, match="a LayerWiseDummyOptimizer, not one that Accelerate has prepared"):
        plimsoll.transformers.fit(trainer)
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_a_loss_that_is_partly_divided_by_the_items_is_cut_right(tmp_path: Path):
    """As of a mixture of experts: a sum over tokens that is divided, and a mean of the batch beside it."""

    class Mixed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"])
            logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
            each = nn.functional.cross_entropy(logits, labels, reduction="none")
            mean = logits[labels != -100].square().mean()
            num_items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
            return each.sum() / num_items + 0.1 * mean

    assert_alike(*run_short(tmp_path, [2, 3, 4, 7], Mixed))
