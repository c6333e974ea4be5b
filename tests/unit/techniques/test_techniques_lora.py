"""Adapters of a frozen model: what is trained, what is saved, and that nothing is left behind."""

import importlib.util

import pytest
import torch
from torch import nn

import workloads
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.optimizers import build_schedule
from plimsoll.records.job import OptimizerChoice
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.run.boundary import Position
from plimsoll.run.rehearse import StageBackend, _stage
from plimsoll.run.step import TrainStep
from plimsoll.techniques import Setting, installed
from plimsoll.techniques.lora import Lora, adapted_layers
from plimsoll.workload import Workload, model_loss

HAS_PEFT = importlib.util.find_spec("peft") is not None
needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed: pip install torch-plimsoll[lora]")
ALLOWED = Setting(device="cpu", batch_size=8, allow=frozenset({"lora"}))
RANK_2 = Choice(technique="lora", options={"rank": 2, "alpha": 4})
CASES = {case.name: case for case in workloads.CASES}


def made(name="gpt2"):
    model, optimizer = CASES[name].fresh()
    return Workload(model, optimizer, model_loss, CASES[name].units)


def test_without_peft_it_says_what_to_type():
    if HAS_PEFT:
        assert isinstance(Lora().menu(made(), ALLOWED), tuple)
    else:
        assert Lora().menu(made(), ALLOWED) == "peft is not installed: `pip install torch-plimsoll[lora]`"


def test_it_must_be_allowed_by_name():
    reason = Lora().conflicts(RANK_2, (), made(), Setting(device="cpu", batch_size=8))
    assert reason == "it is lossy: allow it with `allow: [lora]`"


@pytest.mark.parametrize(
    ("options", "reason"), [({"rank": 0, "alpha": 1}, "rank is 0"), ({"rank": 1}, "alpha is None")]
)
def test_sizes_that_are_none_are_refused(options, reason):
    assert Lora().conflicts(Choice(technique="lora", options=options), (), made(), ALLOWED).startswith(reason)


def test_the_layers_are_those_of_the_blocks():
    in_block = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert adapted_layers(made().model) == [f"transformer.h.{i}.{name}" for i in (0, 1) for name in in_block]
    assert len(adapted_layers(made("bert").model)) == 2 * 6
    assert adapted_layers(nn.Linear(1, 1)) == []


@needs_peft
def test_a_model_of_another_kind_is_refused():
    assert "a Lstm is not a model of transformers" in Lora().menu(made("lstm"), ALLOWED)


@needs_peft
@pytest.mark.parametrize(
    ("name", "num_trained"),
    [
        # rank 2: (in + out) * 2 for 16 -> 48, 16 -> 16, 16 -> 64 and 64 -> 16, in 2 blocks
        ("gpt2", 2 * 2 * (64 + 32 + 80 + 80)),
        # four of 16 -> 16, 16 -> 32 and 32 -> 16 in 2 blocks, and the head of 16 -> 3
        ("bert", 2 * 2 * (4 * 32 + 2 * 48) + 16 * 3 + 3),
    ],
)
def test_only_the_adapters_and_a_new_head_are_trained(name, num_trained):
    case, workload = CASES[name], made(name)
    plain = {key: value.clone() for key, value in workload.model.state_dict().items()}
    batch = case.batches()[0]
    with installed(workload, [RANK_2]):
        trained = [one for group in workload.optimizer.param_groups for one in group["params"]]
        assert sum(one.numel() for one in trained) == num_trained
        before = [one.detach().clone() for one in trained]
        step = TrainStep(workload.model, workload.optimizer, units=case.units, micro_batch=4, clip_norm=1.0)
        step(batch)
        step(batch)
        assert not any(torch.equal(one, old) for one, old in zip(trained, before, strict=True))
    assert workload.model.state_dict().keys() == plain.keys()
    assert all(torch.equal(value, plain[key]) for key, value in workload.model.state_dict().items())


@needs_peft
def test_at_first_the_loss_is_that_of_the_plain_model():
    workload, batch = made("bert"), CASES["bert"].batches()[0]
    workload.model.eval()
    plain = model_loss(workload.model, batch)
    with installed(workload, [RANK_2]):
        assert torch.equal(model_loss(workload.model.eval(), batch), plain)


@needs_peft
def test_everything_is_put_back():
    workload = made("bert")
    model, optimizer = workload.model, workload.optimizer
    model.bert.embeddings.requires_grad_(False)
    model_loss(model, CASES["bert"].batches()[0]).backward()
    optimizer.step()

    def everything():
        return (
            [(name, id(module), module.training) for name, module in model.named_modules()],
            [(name, id(one), one.requires_grad) for name, one in model.named_parameters()],
            [id(one) for one in optimizer.param_groups[0]["params"]],
            {id(key): id(value["exp_avg"]) for key, value in optimizer.state.items()},
            set(vars(model)),
        )

    before = everything()
    with installed(workload, [RANK_2]):
        assert everything() != before
        assert not optimizer.state
    assert everything() == before


@needs_peft
def test_an_error_on_the_way_in_leaves_the_model_as_it_was():
    workload = made()
    before = list(workload.model.named_modules())
    with pytest.raises(ValueError), installed(workload, [Choice(technique="lora", options={"rank": 0, "alpha": 1})]):
        raise AssertionError
    assert list(workload.model.named_modules()) == before
    assert all(parameter.requires_grad for parameter in workload.model.parameters())


@needs_peft
def test_a_rung_of_a_plan_trains_with_the_schedule():
    case = CASES["gpt2"]
    model, optimizer = case.fresh()
    choice = OptimizerChoice(lr=1e-2, schedule="linear")
    schedule = build_schedule(choice, optimizer, 4)
    step = TrainStep(model, optimizer, units=case.units, schedule=schedule, rungs=[[micro_batch_choice(4), RANK_2]])
    results = [step(batch) for batch in case.batches()]
    assert [result.learning_rate for result in results] == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    step.close()
    assert all(parameter.requires_grad for parameter in model.parameters())


@needs_peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_what_is_saved_meanwhile_are_the_adapters(tmp_path):
    from peft import PeftModel

    workload, batch = made("bert"), CASES["bert"].batches()[0]
    model = workload.model
    with installed(workload, [RANK_2]):
        model_loss(model, batch).backward()
        workload.optimizer.step()
        model.eval()
        model.save_pretrained(tmp_path)
        trained = model_loss(model, batch)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(model.eval(), tmp_path)
    assert torch.equal(model_loss(loaded, batch), trained)


@needs_peft
def test_a_rehearsal_needs_what_the_real_step_needs():
    case, workload = CASES["gpt2"], made()
    batch = {name: value.clone() for name, value in case.batches()[0].items()}  # of 32 samples are the storages
    rungs = [[micro_batch_choice(4), RANK_2]]
    position = Position()
    with _stage(CpuLowering(), position, True) as stage:
        model, optimizer = stage.fake_training(workload.model, workload.optimizer)
        stage.recorder.know_model(model)
        step = TrainStep(
            model, optimizer, units=case.units, rungs=rungs, backend=StageBackend("cpu"), position=position
        )
        stage.recorder.know_model(step.workload.model)
        for number in (1, 2):
            stage.recorder.step = number
            step(stage.fake_batch(batch))
            stage.recorder.know_optimizer(optimizer)
    predicted = live_bytes(stage.trace())

    step = TrainStep(workload.model, workload.optimizer, units=case.units, rungs=rungs)
    recorder = Recorder(phase=lambda: "copy" if step.position.phase == "fetch" else step.position.phase)
    with recorder:
        recorder.know_model(step.workload.model)
        recorder.know((("", tensor) for tensor in batch.values()), "inputs")
        for number in (1, 2):
            recorder.step = number
            step(batch)
            recorder.know_optimizer(workload.optimizer)
    measured = live_bytes(recorder.trace("measured", "cpu"))
    assert predicted.peak_bytes == measured.peak_bytes
    states = predicted.by_category["optimizer states"].max()
    assert 2 * 4 * 1024 <= states < 2 * 4 * 1024 + 4 * 32 + 1  # two per number of the adapters, and counters
