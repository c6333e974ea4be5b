"""Adapters of a frozen model: the trained and saved parameters, and complete restoration."""

import importlib.util
import sys

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import workloads
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models.in_files import made_in
from plimsoll.models.optimizers import build_schedule
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.dry_run.step import StageBackend, _stage
from plimsoll.planning.search.pins import decide
from plimsoll.records.job import OptimizerChoice
from plimsoll.records.plan import Choice, micro_batch_choice, parse_pin
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import Setting, installed
from plimsoll.techniques.lora import Lora, adapted_layers
from plimsoll.techniques.mechanisms.building import builds_outside
from plimsoll.techniques.mechanisms.frozen_base import CodedLinear
from plimsoll.training import checkpoint

HAS_PEFT = importlib.util.find_spec("peft") is not None
needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed: pip install torch-plimsoll[lora]")
ALLOWED = Setting(device="cpu", batch_size=8, allow=frozenset({"lora"}))
RANK_2 = Choice(technique="lora", options={"rank": 2, "alpha": 4})
INT8, NF4 = (Choice(technique="lora", options={"rank": 2, "alpha": 4, "base": base}) for base in ("int8", "nf4"))
in_codes = pytest.mark.parametrize("choice", [INT8, NF4], ids=["int8", "nf4"])
all_bases = pytest.mark.parametrize("choice", [RANK_2, INT8, NF4], ids=["kept", "int8", "nf4"])
CASES = {case.name: case for case in workloads.CASES}


def made(name="gpt2"):
    model, optimizer = CASES[name].fresh()
    return Workload(model, optimizer, model_loss, CASES[name].units)


def test_without_peft_it_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # marks the module as missing
    assert Lora().choices(made(), ALLOWED) == "peft is not installed: `pip install torch-plimsoll[lora]`"


def test_it_must_be_allowed_by_name():
    reason = Lora().conflicts(RANK_2, (), made(), Setting(device="cpu", batch_size=8))
    assert reason == "it is lossy: allow it with `allow: [lora]`"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rank": 0, "alpha": 1}, "rank is 0"),
        ({"rank": 1}, "alpha is None"),
        ({"rank": 1, "alpha": 1, "base": "int4"}, "base is int4: give one of kept, int8, nf4"),
    ],
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
    assert "a Lstm is not a model of transformers" in Lora().choices(made("lstm"), ALLOWED)


@needs_peft
@all_bases
@pytest.mark.parametrize(
    ("name", "num_trained"),
    [
        # rank 2: (in + out) * 2 for 16 -> 48, 16 -> 16, 16 -> 64 and 64 -> 16, in 2 blocks
        ("gpt2", 2 * 2 * (64 + 32 + 80 + 80)),
        # four of 16 -> 16, 16 -> 32 and 32 -> 16 in 2 blocks, and the head of 16 -> 3
        ("bert", 2 * 2 * (4 * 32 + 2 * 48) + 16 * 3 + 3),
    ],
)
def test_only_the_adapters_and_a_new_head_are_trained(name, num_trained, choice):
    case, workload = CASES[name], made(name)
    plain = {key: value.clone() for key, value in workload.model.state_dict().items()}
    batch = case.batches()[0]
    with installed(workload, [choice]):
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
@all_bases
def test_everything_is_put_back(choice):
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
    with installed(workload, [choice]):
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
def test_a_configuration_of_a_plan_trains_with_the_learning_rate_schedule():
    case = CASES["gpt2"]
    model, optimizer = case.fresh()
    choice = OptimizerChoice(lr=1e-2, schedule="linear")
    schedule = build_schedule(choice, optimizer, 4)
    step = TrainStep(model, optimizer, units=case.units, schedule=schedule, fallbacks=[[micro_batch_choice(4), RANK_2]])
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
def test_a_plan_can_choose_the_base():
    workload = made()
    available = Lora().choices(workload, ALLOWED)
    assert [choice.options["base"] for choice in available] == ["kept", "int8", "nf4"]
    (pinned,) = decide([parse_pin("lora(base=int8)")], (), workload, ALLOWED).pinned
    assert pinned == available[1]


@needs_peft
@in_codes
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_beside_codes_loss_and_gradients_are_those_of_the_rounded_weights(name, choice):
    case, workload, plain = CASES[name], made(name), made(name)

    def loss_and_gradients(one):
        one.model.eval()  # no dropout
        for key, parameter in one.model.named_parameters():
            if "lora_B" in key:  # they begin with zeros, and then lora_A has no gradient
                nn.init.constant_(parameter, 0.02)
        torch.manual_seed(0)
        for key, parameter in one.model.named_parameters():
            if "lora_A" in key:
                nn.init.normal_(parameter)
        loss = model_loss(one.model, case.batches()[0])
        loss.backward()
        return loss, {key: value.grad for key, value in one.model.named_parameters() if value.requires_grad}

    layers = adapted_layers(workload.model)
    with installed(workload, [choice]):
        bases = [workload.model.get_submodule(layer).base_layer for layer in layers]
        assert all(isinstance(base, CodedLinear) and not base.codes.requires_grad for base in bases)
        for layer, base in zip(layers, bases, strict=True):
            plain.model.get_submodule(layer).weight.data = base.weight
        loss, gradients = loss_and_gradients(workload)
    with installed(plain, [RANK_2]):
        expected_loss, expected = loss_and_gradients(plain)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    assert gradients.keys() == expected.keys()
    assert workloads.largest_relative_difference(expected, gradients) <= 1e-5


@needs_peft
@in_codes
def test_a_checkpoint_beside_codes_can_be_resumed(choice, tmp_path):
    case = CASES["gpt2"]
    batches = case.batches()

    def begun():
        workload = made()
        step = TrainStep(
            workload.model, workload.optimizer, units=case.units, fallbacks=[[micro_batch_choice(4), choice]]
        )
        step.install()
        return step

    first = begun()
    first(batches[0])
    model, optimizer = first.workload.model, first.workload.optimizer
    checkpoint.save(
        tmp_path, 1, model=model, optimizer=optimizer, random_state={}, progress={"fingerprint": {}}, keep=1
    )
    torch.manual_seed(1)  # of dropout
    expected = first(batches[1]).loss
    second = begun()
    for parameter in second.workload.model.parameters():
        parameter.data.zero_()
    checkpoint.load(tmp_path, {}).restore(second.workload.model, second.workload.optimizer)
    torch.manual_seed(1)
    assert second(batches[1]).loss == expected
    states = zip(first.workload.model.state_dict().items(), second.workload.model.state_dict().values(), strict=True)
    assert [name for (name, one), other in states if not torch.equal(one, other)] == []
    first.close()
    second.close()


@pytest.mark.sampled(3)
@needs_peft
@all_bases
def test_a_dry_run_needs_what_the_real_step_needs(choice):
    case, workload = CASES["gpt2"], made()
    batch = {name: value.clone() for name, value in case.batches()[0].items()}  # of 32 samples are the storages
    fallbacks = [[micro_batch_choice(4), choice]]
    position = Position()
    with _stage(CpuLowering(), position, True) as stage:
        model, optimizer = stage.fake_training(workload.model, workload.optimizer)
        stage.recorder.know_model(model)
        step = TrainStep(
            model, optimizer, units=case.units, fallbacks=fallbacks, backend=StageBackend("cpu"), position=position
        )
        stage.recorder.know_model(step.workload.model)
        for number in (1, 2):
            stage.recorder.step = number
            step(stage.fake_batch(batch))
            stage.recorder.know_optimizer(optimizer)
    predicted = live_bytes(stage.trace())

    step = TrainStep(workload.model, workload.optimizer, units=case.units, fallbacks=fallbacks)
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


@needs_peft
@in_codes
def test_what_was_built_in_files_stays_there_and_only_codes_are_in_memory(choice):
    pool = MappedPool()
    with made_in(pool):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=400, n_positions=32))
    optimizer = torch.optim.AdamW(model.parameters())
    workload = Workload(model, optimizer, model_loss, "next-tokens", files=pool)
    dense = [model.get_submodule(name).weight for name in adapted_layers(model)]
    places, values = [one.data_ptr() for one in dense], [one.clone() for one in dense]
    with installed(workload, [choice]):
        assert all(map(pool.holds, dense))
        private = [one for one in model.parameters() if not pool.holds(one)]
        assert sum(one.nbytes for one in private) < 0.4 * sum(one.nbytes for one in dense)
        model_loss(model, {name: torch.ones(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}).backward()
    assert [one.data_ptr() for one in dense] == places
    assert all(map(torch.equal, dense, values))
    assert builds_outside([micro_batch_choice(1), choice], "cpu")
    assert not builds_outside([micro_batch_choice(1), RANK_2], "cpu")
