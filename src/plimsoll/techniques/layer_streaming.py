"""Weights of blocks on the host, copied to the GPU while a block computes: for models larger than the GPU's memory.

    Choice(technique="layer_streaming", options={"blocks": "all"})     or "every 2", or "0,3-5", as for checkpointing

The parameters of the chosen blocks are in pinned host memory, with their gradients and optimizer states. The optimizer
updates them there, on the CPU. In each pass they are copied to the device block by block
(`plimsoll.techniques.mechanisms.streamed_layers`). Modules outside the blocks (embeddings, the output layer) stay on
the device.

A model that is larger than the GPU's memory is never on the GPU as a whole: it is built with its streamed blocks on the
host (`mechanisms.building`).

Numerics: bitwise in forward and backward. The update runs on the CPU, whose kernels may round differently from the
GPU's. Does NOT cover training on a CPU (see `parameter_offload`), and recurrent layers, which keep lists of their
weights. Parameters that are quantized, or shared with other modules, stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plimsoll.device.off_device import is_marked, mark_outside, unmark
from plimsoll.errors import InputError
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.checkpointing import Checkpointing, chosen_blocks
from plimsoll.techniques.mechanisms.blocks import Blocks, blocks_of
from plimsoll.techniques.mechanisms.pinned import PinnedPool
from plimsoll.techniques.mechanisms.streamed_layers import streamable_parameters, streamed
from plimsoll.techniques.mechanisms.technique import Choices, Setting, Technique

_NOT_ON_CPU = "on a CPU the weights are in host memory already; parameter_offload moves them to a file"


class LayerStreaming(Technique):
    """`Technique`: weights of blocks on the host, copied to the GPU for each use."""

    name = "layer_streaming"
    numerics = "reordered"
    summary = "weights of blocks kept and updated on the host, and copied to the GPU block by block"
    modifies = frozenset({"model", "optimizer"})
    moves = frozenset({"parameters", "states"})
    reaches = frozenset({"parameters", "gradients", "optimizer states"})
    not_captured = "blocks are copied to the device in each pass"
    keeps_state_between_passes = False
    spans_blocks = True
    by_hand = "use offload_param of DeepSpeed's ZeRO stage 3, which offloads all parameters, not only chosen blocks"
    stage = "places"
    turn = 1

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return up to two choices: every second block, and all blocks."""
        blocks = blocks_of(workload.model)
        reason = _why_not(blocks, workload, setting)
        if reason is not None:
            return reason
        return tuple(_choice(text) for text in (["every 2"] if len(blocks) > 2 else []) + ["all"])

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the device is not CUDA, or the chosen blocks do not exist or cannot be streamed."""
        blocks = blocks_of(workload.model)
        try:
            numbers = chosen_blocks(str(choice.options["blocks"]), len(blocks))
        except InputError as error:
            return str(error).replace(Checkpointing.name, self.name)
        return _why_not(tuple(blocks[number] for number in numbers), workload, setting)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Move the parameters of the blocks and their states to the host; on exit, move them back."""
        names = _names(workload.model, choice)
        parameters = streamable_parameters(workload.model, names)
        pool, device = PinnedPool(), workload.device
        here = [one for one in workload.model.parameters() if one in parameters and _is_on(one, device)]
        with ExitStack() as stack:
            stack.callback(_bring_back, here, workload.optimizer, device)
            for parameter in here:
                parameter.data = pool.copy_of(parameter)
                mark_outside(parameter)
                _move_states(workload.optimizer, parameter, pool.copy_of)
            stack.enter_context(streamed(workload.model, names, device=device))
            yield

    def builds_outside(self, choice: Choice, device: Literal["cpu", "cuda"]) -> bool:
        """Return whether streamed blocks are built on the host: True on CUDA."""
        return device == "cuda"

    def kept_on_host(self, choice: Choice, model: nn.Module) -> Set[nn.Parameter]:
        """Return the streamed parameters."""
        return streamable_parameters(model, _names(model, choice))


def _is_on(parameter: nn.Parameter, device: torch.device) -> bool:
    """Return whether a parameter is in the memory of the device. If so, it must be moved back there at the end."""
    return parameter.device.type == device.type and not is_marked(parameter)


def _bring_back(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move parameters to the device. If memory runs out, the remaining parameters stay on the host and can be saved."""

    def back(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.copy_(tensor)

    for parameter in parameters:
        with torch.no_grad():
            parameter.data = back(parameter.detach())
            unmark(parameter)
            if parameter.grad is not None:
                parameter.grad = back(parameter.grad)
        _move_states(optimizer, parameter, back)


def _move_states(
    optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter, moved: Callable[[Tensor], Tensor]
) -> None:
    """Move the optimizer states of a parameter, except the step count, whose device the optimizer's kernel decides."""
    state: dict[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.layout is torch.strided and value.dim():
            with torch.no_grad():
                state[key] = moved(value)


def _names(model: nn.Module, choice: Choice) -> list[str]:
    blocks = blocks_of(model)
    return [blocks[number][0] for number in chosen_blocks(str(choice.options["blocks"]), len(blocks))]


def _why_not(blocks: Blocks, workload: Workload, setting: Setting) -> str | None:
    """Return the reason why blocks cannot be streamed; ``None`` if they can."""
    if setting.device == "cpu":
        return _NOT_ON_CPU
    if not blocks:
        return f"the model {type(workload.model).__name__} has no repeated blocks"
    for name, block in blocks:
        if any(isinstance(part, nn.RNNBase) for part in block.modules()):
            return f"{name} has a recurrent layer, which keeps a list of its weights"
    if not streamable_parameters(workload.model, [name for name, _ in blocks]):
        return "the parameters of the blocks are quantized, or shared with the rest of the model"
    return None


def _choice(blocks: str) -> Choice:
    return Choice(technique=LayerStreaming.name, options={"blocks": blocks})
