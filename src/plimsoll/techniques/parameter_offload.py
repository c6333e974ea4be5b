"""Parameters in a memory-mapped file, optionally with their gradients: for CPU budgets that cannot hold them.

The parameter objects of the model and the optimizer stay the same. Their memory is replaced by a memory-mapped file,
storage by storage, so tied parameters stay tied and views stay views. A model that was built in files
(`plimsoll.models.in_files`) is used as it is. If memory runs out on exit, the remaining parameters stay in the file,
and can be trained and saved there.

Numerics: bitwise. Does NOT cover CUDA (see `layer_streaming`), buffers, and parameters that are not dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from plimsoll.device.cpu import heap
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.techniques.heap import Heap
from plimsoll.techniques.mechanisms.allocators import blocks_mapped_from
from plimsoll.techniques.mechanisms.technique import Choices, Exported, Setting, Technique, by_deepspeed
from plimsoll.techniques.optimizer_offload import DEEPSPEED_PLACES, PLACES

_NOT_ON_CUDA = "a GPU cannot read memory-mapped files: layer_streaming copies weights from the host, block by block"


class ParameterOffload(Technique):
    """`Technique`: parameters in a memory-mapped file."""

    name = "parameter_offload"
    numerics = "bitwise"
    summary = "parameters, optionally with gradients, are kept in a memory-mapped file (CPU)"
    moves = frozenset({"parameters"})
    reaches = frozenset({"parameters", "gradients"})
    excludes: ClassVar = {
        Heap.name: "parameter_offload sets the heap up itself (blocks mapped from 128 KiB on), so heap cannot be "
        "combined with it"
    }
    sets_up_heap = True
    not_captured = "parameters are brought to the device in each pass"
    keeps_state_between_passes = False
    exports: ClassVar = {
        "deepspeed": lambda _, device: Exported({
            "zero_optimization": {"stage": 3, "offload_param": {"device": DEEPSPEED_PLACES[PLACES[device]]}}
        }),
        "accelerate": by_deepspeed,
    }  # fmt: skip
    stage = "places"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return two choices: offload only the parameters, or the parameters and their gradients."""
        if setting.device == "cuda":
            return _NOT_ON_CUDA
        return tuple(Choice(technique=self.name, options={"gradients": gradients}) for gradients in (False, True))

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return a reason if the device is CUDA, or `heap` is chosen too."""
        return self.excluded(others) or (_NOT_ON_CUDA if setting.device == "cuda" else None)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Move the parameters to the file; on exit, move them back."""
        pool = workload.files or MappedPool()
        parameters = [parameter for parameter in workload.model.parameters() if parameter.layout is torch.strided]
        here = [parameter for parameter in parameters if not pool.holds(parameter)]
        with ExitStack() as stack:
            # Parameters that move out leave holes in the heap, and temporary tensors would fragment it. For small
            # models, up to 67 MiB more than all live tensors were measured. So large blocks get their own mappings.
            stack.enter_context(blocks_mapped_from(heap.TIGHT_BYTES))
            stack.callback(_bring_back, here, pool)
            if choice.options.get("gradients"):
                for parameter in parameters:
                    if parameter.requires_grad:
                        mover = _Mover(pool)
                        handle = parameter.register_post_accumulate_grad_hook(mover)  # type: ignore[no-untyped-call]
                        stack.callback(handle.remove)
            _exchange(here, pool.copy_of)
            yield

    def builds_outside(self, choice: Choice, device: Literal["cpu", "cuda"]) -> bool:
        """Return whether parameters are built in files: True on the CPU."""
        return device == "cpu"


class _Mover:
    """A hook that moves a gradient to the file when it is accumulated. Later micro-batches add to it in place."""

    def __init__(self, pool: MappedPool) -> None:
        self._pool = pool

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None and not self._pool.holds(parameter.grad):
            parameter.grad = self._pool.copy_of(parameter.grad)


def _bring_back(parameters: list[nn.Parameter], pool: MappedPool) -> None:
    _exchange([parameter for parameter in parameters if pool.holds(parameter)], Tensor.clone)
    for parameter in parameters:
        if parameter.grad is not None and pool.holds(parameter.grad):
            parameter.grad = parameter.grad.clone()


@torch.no_grad()
def _exchange(parameters: list[nn.Parameter], copied: Callable[[Tensor], Tensor]) -> None:
    """Replace the storages of parameters by the results of ``copied``, one at a time. Shared storages stay shared."""
    sharing: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        sharing.setdefault((parameter.untyped_storage()._cdata, parameter.dtype), []).append(parameter)
    for members in sharing.values():
        first = members[0].detach()
        num_elements = first.untyped_storage().nbytes() // first.element_size()
        whole = copied(first.as_strided((num_elements,), (1,), 0))
        for parameter in members:
            parameter.data = whole.as_strided(parameter.size(), parameter.stride(), parameter.storage_offset())
        del first
