"""Runs a training on fake tensors and records what it would allocate: nothing is computed, nothing is allocated.

    trace = trace_training(train_three_steps, CudaLowering((8, 6)))

The function builds the model, or takes one that `fake_model` made, and trains it for a few steps with plain PyTorch
code; it runs as it is, under torch's fake tensors. What the target does otherwise is replaced while it runs (see
`lowering.base`), and values that decide something are known or said to be assumed (see `known`).

Works for any module and any training function whose ops have a fake version, Hugging Face models, packed sequences,
checkpointing and custom autograd functions among them. Does NOT cover torch.compile, CUDA graphs, several devices, and
tensors made by libraries that do not go through torch.
"""

from __future__ import annotations

import copy
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_map

from plimsoll.errors import InputError, PlimsollError
from plimsoll.memory.known import KnownValues
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.untraced import untraced
from plimsoll.records.trace import Phase, Trace

_CANNOT_TRACE = (
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
_INNER_FOLDERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_MOST_FRAMES = 6
_EXPECTED_WARNINGS = (
    "Accessing the data pointer of FakeTensor",  # copy.deepcopy of a module
    "torch.cuda.amp.GradScaler is enabled, but CUDA is not available",
    "User provided device_type of 'cuda', but CUDA is not available",
)


class Rehearsal:
    """A place in which a training runs on fake tensors and is recorded; made by `rehearsal`.

    ``recorder`` takes the phase and step from outside, where they are not to be inferred.
    """

    def __init__(self, lowering: Lowering, phase: Callable[[], Phase] | None) -> None:
        self._lowering = lowering
        self._is_step = phase is not None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known = KnownValues(self.mode, self._where)
        self.recorder = Recorder(
            phase=phase, run=lowering.run_with(self.known.run), scratch_bytes=lowering.scratch_bytes,
            on_host=lowering.on_host,
        )  # fmt: skip

    def fake_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model whose parameters and buffers are fake; the model itself stays as it is."""
        return self._arrived(copy.deepcopy(model, self._faked(model)))

    def fake_training(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return copies of a model and its optimizer that belong together; states that exist are fake too."""
        memo = self._faked(model)
        for state in optimizer.state.values():
            memo |= {id(value): self.known.fake(value) for value in state.values() if isinstance(value, Tensor)}
        return self._arrived(copy.deepcopy(model, memo)), copy.deepcopy(optimizer, memo)

    def fake_batch(self, batch: Any) -> Any:
        """Return a batch of fake tensors as a loader gives it, on the host; its integers stay known.

        What is one tensor in the batch is one in the result.
        """
        fakes: dict[int, Tensor] = {}

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in fakes:
                fakes[id(leaf)] = self._lowering.loaded(self.known.fake(leaf))
            return fakes[id(leaf)]

        result = tree_map(fake, batch)
        self.recorder.know((("", tensor) for tensor in fakes.values()), "inputs")
        return result

    def trace(self) -> Trace:
        """Return what was recorded."""
        return self.recorder.trace("predicted", self._lowering.name, self.known.assumptions)

    def _faked(self, model: nn.Module) -> dict[int, Any]:
        """The fake of each parameter and buffer by its id: what ``copy.deepcopy`` takes as done."""
        memo: dict[int, Any] = {}
        for tensor in chain(model.parameters(), model.buffers()):
            fake = self.known.fake(tensor).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                fake._is_param = True  # what nn.Parameter itself does for a subclass
            memo[id(tensor)] = fake
        return memo

    @staticmethod
    def _arrived(model: nn.Module) -> nn.Module:
        """What ``model.to(device)`` does beside moving: cuDNN's layers join their weights."""
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        return model

    def _where(self) -> str | None:
        """The place that asks for a value; ``None`` for a step of Plimsoll's, which reads its loss and goes on."""
        if self._is_step and not self.recorder.is_in_module:
            return None
        return self.recorder.describe_place()


@contextmanager
def rehearsal(lowering: Lowering, phase: Callable[[], Phase] | None = None) -> Iterator[Rehearsal]:
    """Run the block on fake tensors, with the kernels of the target, and record it.

    Args:
        lowering: the target.
        phase: asked for the phase of the training; ``None`` infers it.

    Raises:
        InputError: if an op in the block has no fake version, or needs values that are not known.
    """
    place = Rehearsal(lowering, phase)
    try:
        with _quiet(), untraced(), lowering.active(place.known.assume), place.mode, place.recorder:
            yield place
    except _CANNOT_TRACE as error:
        raise InputError(_cannot_trace(error, place.recorder.describe_place())) from error


def trace_training(train: Callable[[Rehearsal], Any], lowering: Lowering) -> Trace:
    """Trace a function that trains; every ``optimizer.step()`` ends a step.

    Args:
        train: does a few steps; from the third on they are alike.
        lowering: the target.

    Raises:
        InputError: if the function cannot be traced.
    """
    with rehearsal(lowering) as place:
        place.recorder.step, place.recorder.counts_steps = 1, True
        train(place)
    return place.trace()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from telling what the error that follows says anyway, and from warning of what is meant so."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            for message in _EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        log.disabled = was_disabled


class failures_explained:
    """Let an error of the user's code say what failed and where, in their frames only.

    A class, because it must see errors of any type on their way out; none is held back.
    """

    def __init__(self, what: str, place: Rehearsal) -> None:
        self._what, self._place = what, place

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Raise the explanation in place of an error that is not Plimsoll's and not about fake tensors."""
        if not isinstance(error, Exception) or isinstance(error, (PlimsollError, *_CANNOT_TRACE)):
            return
        frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_INNER_FOLDERS)]
        shown = "".join(traceback.format_list(frames[-_MOST_FRAMES:]))
        raise InputError(
            f"{self._what} fails in the {self._place.recorder.last_phase} phase, on tensors without memory: "
            f"{type(error).__name__}: {error}\n{shown}Check the model and the fields of its batch."
        ) from error


def _cannot_trace(error: Exception, where: str) -> str:
    return (
        f"cannot trace this training without running it: {error}{where} has no version for fake tensors, or its "
        "result depends on values that are not known: give the op one (torch.library.register_fake), or use another"
    )
