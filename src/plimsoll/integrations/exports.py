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
from dataclasses import dataclass
from typing import Any

import yaml

from plimsoll.errors import InputError
from plimsoll.records.plan import Choice, Plan

EXPORTS = ("deepspeed", "accelerate")
"""What `export` can write for."""

_PLACES = {"host": "cpu", "disk": "nvme"}

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

_EXPORTED = ("micro_batch", "autocast", "optimizer_offload", "parameter_offload")

_BY_HAND = {
    "activation_offload": "torch.autograd.graph.save_on_cpu() around forward and loss does it on a GPU",
    "adafactor": "give transformers.Adafactor, or optim=\"adafactor\" to the Trainer",
    "adaptive_softmax": "build the model with nn.AdaptiveLogSoftmaxWithLoss",
    "allocator": "set PYTORCH_CUDA_ALLOC_CONF before the start",
    "attention": "load the model with attn_implementation=\"sdpa\"",
    "by_length": "sort samples by length in the loader (group_by_length in the Trainer)",
    "cache": "call torch.cuda.empty_cache() where memory is short",
    "checkpointing": "call model.gradient_checkpointing_enable(), which takes all blocks",
    "chunked_loss": "use torch.nn.functional.linear_cross_entropy or the Liger kernel",
    "cuda_graph": "capture forward and backward with torch.cuda.graph in a loop of one's own",
    "evaluation": "set the evaluation's batch size (per_device_eval_batch_size in the Trainer)",
    "heap": "set MALLOC_TRIM_THRESHOLD_ before the start",
    "layer_streaming": "ZeRO stage 3 keeps all parameters away, not those of chosen blocks: see its offload_param",
    "lora": "wrap the model with peft.get_peft_model",
    "low_bit_optimizer": "give torchao.optim.AdamW8bit or AdamW4bit as the optimizer",
    "optimizer_in_backward": "register_post_accumulate_grad_hook in a loop of one's own does it",
    "optimizer_kernel": "give the optimizer foreach=False or fused=True, as the option says",
    "truncated_bptt": "cut the sequences and detach the state in the loader and the model",
}  # fmt: skip
"""What does the same where no configuration can."""


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
        raise InputError(f"--export {reader} is no configuration known here: give one of {', '.join(EXPORTS)}")
    if has_other_output:
        raise InputError(
            f"--export {reader} prints one configuration of a plan of a training: leave out --inference, --compare, "
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
    """Write a plan as a DeepSpeed configuration for one process.

    What the script decides (optimizer, schedule, clipping) is ``auto`` or left out: the Trainer fills it in; what
    Accelerate fills in, and what DeepSpeed alone cannot read, is said.

    Raises:
        InputError: if the plan does not fit its budget.
    """
    choices = _choices_of(plan)
    batch, micro_batch, notes = _passes_of(plan)
    config: dict[str, Any] = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": batch // micro_batch,
        "gradient_clipping": "auto",
    }
    precision = _precision_of(choices)
    for name in ("bf16", "fp16"):
        config[name] = {"enabled": precision == name}
    zero = _zero_of(plan)
    if zero["stage"]:
        config["zero_optimization"] = zero
    alone = (_CLIPPING_ALONE, *([_CPU_ADAM_ALONE] if "offload_optimizer" in zero else []))
    return Export("deepspeed", config, (*alone, *notes, *_not_mapped(plan, choices)))


def to_accelerate(plan: Plan) -> Export:
    """Write a plan as a file for ``accelerate launch --config_file``, for one process.

    With states or parameters off the device it asks for DeepSpeed; without, for plain PyTorch.

    Raises:
        InputError: if the plan does not fit its budget.
    """
    choices = _choices_of(plan)
    batch, micro_batch, notes = _passes_of(plan)
    num_passes, zero = batch // micro_batch, _zero_of(plan)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if zero["stage"] else "NO",
        "num_machines": 1,
        "num_processes": 1,
        "machine_rank": 0,
        "use_cpu": _kind_of(plan) == "cpu",
        "mixed_precision": {"fp32": "no"}.get(_precision_of(choices), _precision_of(choices)),
    }
    said = f"give the loader batch_size={micro_batch} and the Accelerator gradient_accumulation_steps={num_passes}"
    if zero["stage"]:
        config["deepspeed_config"] = {
            "zero_stage": zero["stage"],
            "gradient_accumulation_steps": num_passes,
            "offload_optimizer_device": zero.get("offload_optimizer", {}).get("device", "none"),
            "offload_param_device": zero.get("offload_param", {}).get("device", "none"),
        }
        said, notes = f"give the loader batch_size={micro_batch}", (*notes, _CLIPPING_OF_ACCELERATE)
    loader = f"micro_batch={micro_batch} of {batch}: the file has no place for the samples of a pass: {said}"
    return Export("accelerate", config, (loader, *notes, *_not_mapped(plan, choices)))


def _choices_of(plan: Plan) -> tuple[Choice, ...]:
    if not plan.fits:
        raise InputError(
            f"the plan does not fit: its smallest fallback needs a budget of {plan.smallest_budget_bytes} bytes, so there "
            "is nothing to export: give that much, or allow more techniques"
        )
    return plan.choices


def _passes_of(plan: Plan) -> tuple[int, int, tuple[str, ...]]:
    """Samples of a batch and of a pass, and what had to be changed."""
    planned = plan.fallbacks[0].micro_batch
    batch = (
        plan.plain.micro_batch if plan.plain is not None else max(fallback.micro_batch for fallback in plan.fallbacks)
    )
    micro_batch = next(size for size in range(min(planned, batch), 0, -1) if batch % size == 0)
    if micro_batch == planned:
        return batch, micro_batch, ()
    return batch, micro_batch, (
        f"micro_batch={planned}: passes of one size cannot make a batch of {batch} of it; exported as {micro_batch}",
    )  # fmt: skip


def _precision_of(choices: tuple[Choice, ...]) -> str:
    return next((str(choice.options["dtype"]) for choice in choices if choice.technique == "autocast"), "fp32")


def _kind_of(plan: Plan) -> str:
    return plan.prediction.device_kind if plan.prediction is not None else "cuda"


def _zero_of(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's section: stage 2 for states off the device, 3 for parameters; stage 0 is none."""
    zero: dict[str, Any] = {"stage": 0}
    where = "disk" if _kind_of(plan) == "cpu" else "host"
    for choice in plan.choices:
        place = {"device": _PLACES[str(choice.options.get("to", where))]}
        if choice.technique == "optimizer_offload":  # only stage 3 goes to a disk
            least = 3 if place["device"] == "nvme" else 2
            zero |= {"stage": max(zero["stage"], least), "offload_optimizer": place}
        elif choice.technique == "parameter_offload":
            zero |= {"stage": 3, "offload_param": place}
    return zero


def _not_mapped(plan: Plan, choices: tuple[Choice, ...]) -> tuple[str, ...]:
    others = [choice for choice in choices if choice.technique not in _EXPORTED]
    notes = [f"{choice.in_full}: {_BY_HAND.get(choice.technique, 'neither has it')}" for choice in others]
    if "nvme" in str(_zero_of(plan)):
        notes.append("nvme: add nvme_path (Accelerate: offload_optimizer_nvme_path), a folder on the disk")
    if len(plan.fallbacks) > 1:
        notes.append(
            f"{len(plan.fallbacks) - 1} fallbacks: neither DeepSpeed nor Accelerate undoes a step in which memory ran out; "
            "plimsoll.TrainStep, and the adapters for Accelerate and Lightning, do"
        )
    return tuple(notes)
