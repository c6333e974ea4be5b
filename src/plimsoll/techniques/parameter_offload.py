"""Parameters, and with ``gradients`` their gradients, in a mapped file: for a CPU budget that cannot hold them.

The parameters stay the objects that the model and the optimizer know; their memory is exchanged for a file's, storage
by storage, so that what is tied or a view stays so. A model that was built in files (`plimsoll.models.in_files`) is
taken over as it is. If memory runs out in the exit, the parameters that are not back yet stay in the file: they train
and are saved as well.

Numerics: bitwise. Does NOT cover CUDA (see `layer_streaming`), parameters that are not plain dense tensors, and
buffers.
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

_NOT_ON_CUDA = "a GPU cannot read a file's pages: layer_streaming brings weights to it from the host, block by block"


class ParameterOffload(Technique):
    """`Technique`: parameters in a mapped file."""

    name = "parameter_offload"
    numerics = "bitwise"
    summary = "parameters, and gradients as well, in a mapped file (CPU)"
    moves = frozenset({"parameters"})
    reaches = frozenset({"parameters", "gradients"})
    excludes: ClassVar = {
        Heap.name: "parameter_offload sets the heap up itself (blocks mapped from 128 KiB on), and heap cannot go with "
        "it"
    }
    sets_up_heap = True
    not_captured = "parameters come to the device in each pass"
    keeps_state_between_passes = False
    exports: ClassVar = {
        "deepspeed": lambda _, device: Exported({
            "zero_optimization": {"stage": 3, "offload_param": {"device": DEEPSPEED_PLACES[PLACES[device]]}}
        }),
        "accelerate": by_deepspeed,
    }  # fmt: skip
    stage = "places"

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """The parameters; the parameters and their gradients."""
        if setting.device == "cuda":
            return _NOT_ON_CUDA
        return tuple(Choice(technique=self.name, options={"gradients": gradients}) for gradients in (False, True))

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """It is for the CPU, and sets the heap up itself."""
        return self.excluded(others) or (_NOT_ON_CUDA if setting.device == "cuda" else None)

    @contextmanager
    def install(self, workload: Workload, choice: Choice) -> Iterator[None]:
        """Exchange the memory of the parameters; on exit it is exchanged again."""
        pool = workload.files or MappedPool()
        parameters = [parameter for parameter in workload.model.parameters() if parameter.layout is torch.strided]
        here = [parameter for parameter in parameters if not pool.holds(parameter)]
        with ExitStack() as stack:
            # What comes and goes meanwhile would fragment the heap, in which the parameters leave holes: up to 67 MiB
            # more than live tensors explain were measured for small models. So large blocks are mapped by themselves.
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
        """Return whether parameters are built in files: on the CPU."""
        return device == "cpu"


class _Mover:
    """Moves the gradient of a parameter when it is complete; later micro-batches add to it in place."""

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
    """Give parameters the memory of copies, made one storage at a time; those of one storage still share it."""
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
