"""The export of a plan as a configuration of DeepSpeed or Accelerate.

    plimsoll plan job.yaml --budget 6GiB --export deepspeed > deepspeed.json
    to_deepspeed(plan).config

Only settings with the same meaning are exported: micro-batch and accumulation, autocast, and optimizer states and
parameters that are offloaded. The batch of the plan does not change. Both tools need micro-batches of one size. So if
the micro-batch does not divide the batch, the next smaller divisor is exported. ``not_mapped`` lists all other choices
and, if possible, how to do the same in a script.

Sources: https://www.deepspeed.ai/docs/config-json/ and ``accelerate.commands.config.config_args.ClusterConfig`` (1.15).
    The predicted peak of the plan does NOT hold in these tools: both allocate buffers of their own, and neither retries
    a step.
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
"""The tools that `export` supports."""

_CLIPPING_ALONE = (
    "gradient_clipping=auto: the Trainer fills in its max_grad_norm, and Accelerate 1.0; DeepSpeed alone cannot read "
    "auto: write the norm, or 0.0 for no clipping"
)
_CPU_ADAM_ALONE = (
    "offload_optimizer: DeepSpeed uses its own Adam on the CPU for it, and refuses other optimizers: use "
    'deepspeed.ops.adam.DeepSpeedCPUAdam, or set "zero_force_ds_cpu_optimizer": false'
)
_CLIPPING_OF_ACCELERATE = (
    "clipping: with DeepSpeed, Accelerate clips gradients to a norm of 1.0 by default: add gradient_clipping to "
    "deepspeed_config, 0.0 for no clipping"
)


@dataclass(frozen=True, slots=True)
class Export:
    """A plan as a configuration of another tool.

    Attributes:
        reader: the name of the tool, one of `EXPORTS`.
        config: the settings of the tool.
        not_mapped: sentences on choices of the plan that the configuration does not express, and on settings to add.
    """

    reader: str
    config: dict[str, Any]
    not_mapped: tuple[str, ...]

    @property
    def text(self) -> str:
        """The content of the file: JSON for DeepSpeed, YAML for Accelerate."""
        if self.reader == "deepspeed":
            return json.dumps(self.config, indent=2) + "\n"
        text: str = yaml.safe_dump(self.config, sort_keys=False)
        return text


def require_exportable(reader: str, has_other_output: bool) -> None:
    """Check the option ``--export``.

    Args:
        reader: the value of ``--export``: the tool that will read the exported file.
        has_other_output: whether --inference, --compare, --json or -o is given.

    Raises:
        InputError: if the tool is unknown, or one of these options is given.
    """
    if reader not in EXPORTS:
        raise InputError(f"--export {reader} is not supported: give one of {', '.join(EXPORTS)}")
    if has_other_output:
        raise InputError(
            f"--export {reader} works only for the plan of one training: leave out --inference, --compare, "
            "--json and -o"
        )


def export(plan: Plan, reader: str) -> Export:
    """Export a plan for the tool ``reader``, one of `EXPORTS`.

    Raises:
        InputError: if the tool is not supported, or the plan does not fit its budget.
    """
    if reader not in EXPORTS:
        raise InputError(f"cannot export a plan for {reader!r}: choose one of {', '.join(EXPORTS)}")
    return to_deepspeed(plan) if reader == "deepspeed" else to_accelerate(plan)


def to_deepspeed(plan: Plan) -> Export:
    """Export a plan as a DeepSpeed configuration, with one process per rank of the plan.

    Settings of the script (optimizer, schedule, clipping) are ``auto`` or left out, and the Trainer fills them in.
    ``not_mapped`` also names the settings that Accelerate fills in differently, or that DeepSpeed without the Trainer
    cannot read.

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
    """Export a plan as a file for ``accelerate launch --config_file``, with one process per rank of the plan.

    The file selects DeepSpeed if states or parameters are offloaded, FSDP if they are sharded over ranks, and otherwise
    plain PyTorch.

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
    loader = f"micro_batch={micro_batch} of {batch}: the file cannot set the micro-batch: {said}"
    return Export("accelerate", config, (loader, *notes, *not_mapped, *_what_is_left(plan, config)))


def kind_of(plan: Plan) -> Literal["cpu", "cuda"]:
    """Return the kind of device that a plan is made for."""
    return plan.prediction.device_kind if plan.prediction is not None else "cuda"


def _passes_of(plan: Plan) -> tuple[int, int, tuple[str, ...]]:
    """Return a rank's samples per batch, its samples per exported micro-batch, and notes.

    There is a note if the exported micro-batch differs from the plan's.
    """
    if not plan.fits:
        raise InputError(
            f"the plan does not fit its budget, so it cannot be exported: give a budget of at least "
            f"{plan.smallest_budget_bytes} bytes, or allow more techniques"
        )
    planned = plan.fallbacks[0].micro_batch
    batch = plan.plain.micro_batch if plan.plain is not None else max(one.micro_batch for one in plan.fallbacks)
    micro_batch = next(size for size in range(min(planned, batch), 0, -1) if batch % size == 0)
    if micro_batch == planned:
        return batch, micro_batch, ()
    return (
        batch,
        micro_batch,
        (f"micro_batch={planned}: it does not divide the batch of {batch}, so {micro_batch} is exported",),
    )


def _num_ranks(plan: Plan) -> int:
    exchange = plan.prediction.exchange if plan.prediction is not None else None
    return exchange.num_ranks if exchange is not None else 1


def _with_settings(config: dict[str, Any], plan: Plan, reader: Tool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add the settings of the plan's techniques to ``config``, the configuration for the tool ``reader``.

    Returns:
        The new configuration, and notes on techniques that the tool lacks or that need further steps by the user.
    """
    from plimsoll.techniques import TECHNIQUES  # imports torch

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
    """Yield notes on settings that the user must add, and on features that the tool lacks."""
    if "nvme" in str(config):
        yield "nvme: add nvme_path (Accelerate: offload_optimizer_nvme_path), a folder on the disk"
    if len(plan.fallbacks) > 1:
        yield (
            f"{len(plan.fallbacks) - 1} fallbacks: neither DeepSpeed nor Accelerate can undo a step in which memory "
            "ran out; plimsoll.TrainStep and the adapters for Accelerate and Lightning can"
        )


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two configurations recursively: the larger of two integers (ZeRO stages) wins, otherwise ``other`` wins."""
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
