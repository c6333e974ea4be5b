"""A plan as a configuration of DeepSpeed or Accelerate, and what of it neither can say.

    plimsoll plan job.yaml --budget 6GiB --export deepspeed > deepspeed.json
    to_deepspeed(plan).config

Only what means the same there is exported: the samples of a pass and how many passes make a batch, autocast, optimizer
states and parameters kept off the device. The batch stays the plan's: where the micro-batch does not divide it, the
largest that does and is no larger is taken, since both have passes of one size. Everything else is named in
``not_mapped``, with what does the same in a script of one's own where there is such a thing.

Sources: https://www.deepspeed.ai/docs/config-json/ and ``accelerate.commands.config.config_args.ClusterConfig`` (1.15).
Does NOT say that the plan's predicted peak holds there: both keep buffers of their own, and nothing retries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import yaml

from plimsoll.errors import InputError
from plimsoll.records.plan import Plan

if TYPE_CHECKING:
    from plimsoll.techniques.mechanisms.technique import Tool

EXPORTS = ("deepspeed", "accelerate")
"""What `export` can write for."""

_CLIPPING_ALONE = (
    "gradient_clipping=auto: the Trainer fills in its max_grad_norm, and Accelerate 1.0; DeepSpeed alone cannot read "
    "it: write the norm, 0.0 for none"
)
_CPU_ADAM_ALONE = (
    "offload_optimizer: DeepSpeed takes its own Adam on the CPU for it, and refuses another optimizer: build "
    'deepspeed.ops.adam.DeepSpeedCPUAdam, or set "zero_force_ds_cpu_optimizer": false'
)
_CLIPPING_OF_ACCELERATE = (
    "clipping: with DeepSpeed Accelerate clips gradients to a norm of 1.0 unless told otherwise: add gradient_clipping "
    "to deepspeed_config, 0.0 for none"
)


@dataclass(frozen=True, slots=True)
class Export:
    """A configuration, the name of what reads it, and a sentence for each choice that is not in it."""

    reader: str
    config: dict[str, Any]
    not_mapped: tuple[str, ...]

    @property
    def text(self) -> str:
        """The file to write: JSON for DeepSpeed, YAML for Accelerate."""
        if self.reader == "deepspeed":
            return json.dumps(self.config, indent=2) + "\n"
        text: str = yaml.safe_dump(self.config, sort_keys=False)
        return text


def require_exportable(reader: str, has_other_output: bool) -> None:
    """Refuse a configuration that there is not, or that would be printed beside something else.

    Raises:
        InputError: it says what to give or to leave out.
    """
    if reader not in EXPORTS:
        raise InputError(f"--export {reader} is not supported: give one of {', '.join(EXPORTS)}")
    if has_other_output:
        raise InputError(
            f"--export {reader} works only for the plan of one training: leave out --inference, --compare, "
            "--json and -o"
        )


def export(plan: Plan, reader: str) -> Export:
    """Write a plan for one of `EXPORTS`.

    Raises:
        InputError: if there is no such reader, or the plan does not fit its budget.
    """
    if reader not in EXPORTS:
        raise InputError(f"cannot export a plan for {reader!r}: choose one of {', '.join(EXPORTS)}")
    return to_deepspeed(plan) if reader == "deepspeed" else to_accelerate(plan)


def to_deepspeed(plan: Plan) -> Export:
    """Write a plan as a DeepSpeed configuration, for as many processes as the plan has ranks.

    What the script decides (optimizer, schedule, clipping) is ``auto`` or left out: the Trainer fills it in; what
    Accelerate fills in, and what DeepSpeed alone cannot read, is said.

    Raises:
        InputError: if the plan does not fit its budget.
    """
    batch, micro_batch, notes = _passes_of(plan)
    config: dict[str, Any] = {
        "train_batch_size": batch * _num_ranks(plan),
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": batch // micro_batch,
        "gradient_clipping": "auto",
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
    }
    config, not_mapped = _with_settings(config, plan, "deepspeed")
    alone = (_CLIPPING_ALONE, *([_CPU_ADAM_ALONE] if "offload_optimizer" in str(config) else []))
    return Export("deepspeed", config, (*alone, *notes, *not_mapped, *_what_is_left(plan, config)))


def to_accelerate(plan: Plan) -> Export:
    """Write a plan as a file for ``accelerate launch --config_file``, for as many processes as the plan has ranks.

    With states or parameters off the device it asks for DeepSpeed, and for FSDP with those that are shared out over the
    ranks; without, for plain PyTorch.

    Raises:
        InputError: if the plan does not fit its budget.
    """
    batch, micro_batch, notes = _passes_of(plan)
    num_passes, num_ranks, kind = batch // micro_batch, _num_ranks(plan), kind_of(plan)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if num_ranks == 1 else {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}[kind],
        "num_machines": 1,
        "num_processes": num_ranks,
        "machine_rank": 0,
        "use_cpu": kind == "cpu",
        "mixed_precision": "no",
    }
    config, not_mapped = _with_settings(config, plan, "accelerate")
    said = f"give the loader batch_size={micro_batch} and the Accelerator gradient_accumulation_steps={num_passes}"
    if config["distributed_type"] == "DEEPSPEED":
        config.pop("fsdp_config", None)
        zero = to_deepspeed(plan).config["zero_optimization"]
        config["deepspeed_config"] = {
            "zero_stage": zero["stage"],
            "gradient_accumulation_steps": num_passes,
            "offload_optimizer_device": zero.get("offload_optimizer", {}).get("device", "none"),
            "offload_param_device": zero.get("offload_param", {}).get("device", "none"),
        }
        said, notes = f"give the loader batch_size={micro_batch}", (*notes, _CLIPPING_OF_ACCELERATE)
    loader = f"micro_batch={micro_batch} of {batch}: the file has no place for the samples of a pass: {said}"
    return Export("accelerate", config, (loader, *notes, *not_mapped, *_what_is_left(plan, config)))


def kind_of(plan: Plan) -> Literal["cpu", "cuda"]:
    """The kind of device that a plan is for."""
    return plan.prediction.device_kind if plan.prediction is not None else "cuda"


def _passes_of(plan: Plan) -> tuple[int, int, tuple[str, ...]]:
    """Samples of a rank's batch and of a pass, and what had to be changed."""
    if not plan.fits:
        raise InputError(
            f"the plan does not fit: its smallest fallback needs a budget of {plan.smallest_budget_bytes} bytes, so "
            "there is nothing to export: give that much, or allow more techniques"
        )
    planned = plan.fallbacks[0].micro_batch
    batch = plan.plain.micro_batch if plan.plain is not None else max(one.micro_batch for one in plan.fallbacks)
    micro_batch = next(size for size in range(min(planned, batch), 0, -1) if batch % size == 0)
    if micro_batch == planned:
        return batch, micro_batch, ()
    return (
        batch,
        micro_batch,
        (f"micro_batch={planned}: passes of one size cannot make a batch of {batch} of it; exported as {micro_batch}",),
    )


def _num_ranks(plan: Plan) -> int:
    exchange = plan.prediction.exchange if plan.prediction is not None else None
    return exchange.num_ranks if exchange is not None else 1


def _with_settings(config: dict[str, Any], plan: Plan, reader: Tool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add what the techniques are called in a configuration; what has no name in it is said."""
    from plimsoll.techniques import TECHNIQUES  # which takes torch along

    notes = []
    for choice in plan.fallbacks[0].others:
        technique = TECHNIQUES.get(choice.technique)
        exported = technique.exported(choice, reader, kind_of(plan)) if technique is not None else None
        if exported is None:
            notes.append(f"{choice.in_full}: {(technique and technique.by_hand) or 'neither has it'}")
        else:
            config = _merged(config, exported.settings)
            notes += [f"{choice.in_full}: {exported.note}"] if exported.note else []
    return config, tuple(notes)


def _what_is_left(plan: Plan, config: dict[str, Any]) -> Iterator[str]:
    """Say what the user has to add, and what the reader cannot do."""
    if "nvme" in str(config):
        yield "nvme: add nvme_path (Accelerate: offload_optimizer_nvme_path), a folder on the disk"
    if len(plan.fallbacks) > 1:
        yield (
            f"{len(plan.fallbacks) - 1} fallbacks: neither DeepSpeed nor Accelerate undoes a step in which memory ran "
            "out; plimsoll.TrainStep, and the adapters for Accelerate and Lightning, do"
        )


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both, level by level. Of two numbers the larger, which is the stage that does for both; else the latter."""
    result = dict(one)
    for name, value in other.items():
        before = one.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            result[name] = _merged(before, value)
        elif isinstance(value, int) and isinstance(before, int):
            result[name] = max(before, value)
        else:
            result[name] = value
    return result
