"""Plans exported to DeepSpeed and Accelerate, which read them, and plans that cannot be exported."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from plan_records import configuration, fitting_plan
from plimsoll.errors import InputError
from plimsoll.integrations.exports import export, to_accelerate, to_deepspeed
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.prediction import Estimate, Exchange


def plan_of(*choices, samples=16, batch=64):
    return fitting_plan(
        fallbacks=(configuration(*choices, micro_batch_choice(samples), mib=1000, seconds=1.0),),
        plain=configuration(micro_batch_choice(batch), mib=5120, seconds=1.0),
        prediction=None,
    )


OFFLOAD = Choice(technique="optimizer_offload", options={"to": "host"})
PARAMETERS = Choice(technique="parameter_offload", options={"gradients": False})
BF16 = Choice(technique="autocast", options={"dtype": "bf16"})


def test_deepspeed_by_hand():
    found = export(plan_of(BF16, OFFLOAD), "deepspeed")
    assert json.loads(found.text) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    assert [line.partition(": ")[0] for line in found.not_mapped] == ["gradient_clipping=auto", "offload_optimizer"]


def test_parameters_off_the_device_are_stage_3_and_a_disk_needs_it_for_states_too():
    zero = to_deepspeed(plan_of(PARAMETERS, OFFLOAD)).config["zero_optimization"]
    assert zero == {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    disk = to_deepspeed(plan_of(Choice(technique="optimizer_offload", options={"to": "disk"})))
    assert disk.config["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    assert any("add nvme_path" in sentence for sentence in disk.not_mapped)


@pytest.mark.parametrize(("samples", "batch", "exported"), [(16, 64, 16), (7, 24, 6), (5, 7, 1), (64, 64, 64)])
def test_the_batch_stays_as_it_is(samples, batch, exported):
    found = to_deepspeed(plan_of(samples=samples, batch=batch))
    assert found.config["train_micro_batch_size_per_gpu"] == exported
    assert exported * found.config["gradient_accumulation_steps"] == found.config["train_batch_size"] == batch
    assert any(line.startswith("micro_batch=") for line in found.not_mapped) == (exported != samples)


def test_what_neither_has_is_named_with_what_does_it():
    lines = to_deepspeed(fitting_plan()).not_mapped
    assert any(line.startswith("checkpointing(blocks=6): call model.gradient_checkpointing_enable") for line in lines)
    assert any(line.startswith("2 fallbacks: ") for line in lines)
    assert "other: neither has it" in to_deepspeed(plan_of(Choice(technique="other"))).not_mapped


@pytest.mark.parametrize(
    ("choices", "distributed"), [((), "NO"), ((BF16,), "NO"), ((OFFLOAD,), "DEEPSPEED"), ((PARAMETERS,), "DEEPSPEED")]
)
def test_accelerate_reads_its_file(choices, distributed, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    found = to_accelerate(plan_of(*choices))
    (tmp_path / "accelerate.yaml").write_text(found.text)
    loaded = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert loaded.distributed_type == distributed
    assert loaded.mixed_precision == ("bf16" if BF16 in choices else "no")
    assert loaded.num_processes == 1
    assert loaded.use_cpu is False
    assert "batch_size=16" in found.not_mapped[0]
    if distributed == "DEEPSPEED":
        assert loaded.deepspeed_config["gradient_accumulation_steps"] == 4
    assert any(line.startswith("clipping: ") for line in found.not_mapped) == (distributed == "DEEPSPEED")


SHARDS = {"gathered": "twice"}


def sharded(**options):
    return Choice(technique="fully_shard", options=SHARDS | options)


def of_ranks(plan, num_ranks=2):
    """Return the same plan for `num_ranks` ranks."""
    nothing = Estimate(likely_bytes=0, low_bytes=0, high_bytes=0)
    counted = dict.fromkeys(Exchange.model_fields.keys() - {"num_ranks", "kept"}, 0)
    exchange = Exchange(num_ranks=num_ranks, kept=nothing, **counted)
    return plan.model_copy(update={"prediction": fitting_plan().prediction.model_copy(update={"exchange": exchange})})


@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ({}, {"stage": 3}),
        ({"offload": "host"}, {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
        (
            {"offload": "disk"},
            {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
        ),
    ],
)
def test_shards_are_stage_3_of_deepspeed(options, zero):
    found = to_deepspeed(of_ranks(plan_of(sharded(**options))))
    assert found.config["zero_optimization"] == zero
    assert found.config["train_batch_size"] == 2 * 64
    assert not any(line.startswith("fully_shard") for line in found.not_mapped)
    once = to_deepspeed(plan_of(sharded(gathered="once", dtype="bf16")))
    assert once.config["bf16"] == {"enabled": True}
    assert any("ZeRO stage 3 gathers parameters for forward and again" in line for line in once.not_mapped)


@pytest.mark.parametrize(
    ("choices", "distributed"),
    [
        ((sharded(),), "FSDP"),
        ((sharded(offload="host"), BF16), "FSDP"),
        ((sharded(offload="disk"),), "DEEPSPEED"),
        ((sharded(), OFFLOAD), "DEEPSPEED"),
    ],
)
def test_shards_are_fsdp_of_accelerate_or_left_to_deepspeed(choices, distributed, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    found = to_accelerate(of_ranks(plan_of(*choices)))
    (tmp_path / "accelerate.yaml").write_text(found.text)
    loaded = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (loaded.distributed_type, loaded.num_processes) == (distributed, 2)
    assert loaded.mixed_precision == ("bf16" if BF16 in choices else "no")
    if distributed == "FSDP":
        offloads = choices[0].options.get("offload") == "host"
        assert (loaded.fsdp_config["fsdp_version"], loaded.fsdp_config["fsdp_reshard_after_forward"]) == (2, True)
        assert loaded.fsdp_config["fsdp_offload_params"] == offloads
    else:
        assert loaded.deepspeed_config["zero_stage"] == 3
        assert not loaded.fsdp_config
    assert not any(line.startswith("fully_shard") for line in found.not_mapped)


def test_ranks_without_shards_are_processes_of_pytorch():
    assert to_accelerate(of_ranks(plan_of())).config["distributed_type"] == "MULTI_GPU"


def test_a_plan_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="4096 bytes.*give that much"):
        to_accelerate(fitting_plan(smallest_budget_bytes=4096))


def test_an_unknown_reader_is_refused():
    with pytest.raises(InputError, match="'fairscale': choose one of deepspeed, accelerate"):
        export(plan_of(), "fairscale")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--export", "fairscale"], "give one of deepspeed"), (["--export", "deepspeed", "--json"], "leave out")],
)
def test_the_command_refuses_before_it_plans(arguments, message, tmp_path):
    from plimsoll.cli.main import app

    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"model": {"architecture": "lstm"}}))
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "job.yaml"), *arguments])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)
