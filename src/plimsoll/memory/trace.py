"""Runs a training on fake tensors and records what it would allocate: nothing is computed, nothing is allocated.

    trace = trace_training(train_three_steps, CudaLowering((8, 6)))

The function builds the model, or takes one that `fake_model` made, and trains it for a few steps with plain PyTorch
code; it runs as it is, under torch's fake tensors. What the target does otherwise is replaced while it runs (see
`lowering.base`), and values that decide something are known or said to be assumed (see `known_values`).

Works for any module and any training function whose ops have a fake version, Hugging Face models, packed sequences,
checkpointing and custom autograd functions among them. Does NOT cover torch.compile, a program's own CUDA graphs,
several devices, and tensors made by libraries that do not go through torch.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
from torch.utils._pytree import tree_leaves, tree_map

from plimsoll.device.cpu.pages import FileMappings
from plimsoll.device.off_device import outside_the_device
from plimsoll.errors import InputError, PlimsollError
from plimsoll.memory.known_values import KEEPS_ALL, KnownValues
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.recorder import Recorder
from plimsoll.records.trace import Category, Phase, Trace
from plimsoll.weights.parts import with_parts

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
    "CUDA is not available or torch_xla is imported. Disabling autocast",
)


class DryRun:
    """A place in which a training runs on fake tensors and is recorded; made by `dry_run`.

    ``recorder`` takes the phase and step from outside, where they are not to be inferred. ``folds_blocks`` says whether
    blocks of a model that are alike may be noted as one of them was.
    """

    folds_blocks = True

    def __init__(self, lowering: Lowering, phase: Callable[[], Phase] | None, keeps_all: bool) -> None:
        self._lowering = lowering
        self._is_step = phase is not None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known = KnownValues(self.mode, self._where, keeps_all)
        self._files = FileMappings()
        self.recorder = Recorder(
            phase=phase,
            run=lowering.run_with(self.known.run),
            scratch_bytes=lowering.scratch_bytes,
            made=lowering.made,
            on_host=lowering.on_host,
            unwritten=lowering.unwritten,
        )

    def fake_model(self, model: nn.Module, outside: Iterable[Tensor] = ()) -> nn.Module:
        """Return a copy of a model whose parameters and buffers are fake; the model itself stays as it is.

        Args:
            model: the model.
            outside: those of its tensors that do not lie on the device.
        """
        return self._arrived(copy.deepcopy(model, self._faked(model, frozenset(map(id, outside)))))

    def fake_training(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return copies of a model and its optimizer that belong together; states that exist are fake too."""
        memo = self._faked(model)
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    # torch keeps the count of steps on the host, and a CPU model's has to stay there.
                    is_on_host = key == "step" and value.device.type == "cpu"
                    memo[id(value)] = self._loaded(value) if is_on_host else self._fake(value, "optimizer states")
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
                fakes[id(leaf)] = self._loaded(leaf)
            return fakes[id(leaf)]

        result = tree_map(fake, batch)
        self.recorder.know((("", tensor) for tensor in fakes.values()), "inputs")
        return result

    def trace(self) -> Trace:
        """Return what was recorded."""
        return self.recorder.trace("predicted", self._lowering.name, self.known.assumptions)

    def _faked(self, model: nn.Module, outside: Collection[int] = ()) -> dict[int, Any]:
        """The fake of each tensor of a model by its id: what ``copy.deepcopy`` takes as done."""
        memo: dict[int, Any] = {}
        # A module may also keep tensors as plain attributes, as masks are.
        plain = (leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor))
        for tensor in chain(model.parameters(), model.buffers(), plain):
            if id(tensor) in memo:
                continue
            with outside_the_device() if id(tensor) in outside else nullcontext():
                fake = with_parts(tensor, self._fake).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                fake._is_param = True  # what nn.Parameter itself does for a subclass
            memo[id(tensor)] = fake
        return memo

    def _fake(self, real: Tensor, category: Category = "parameters") -> Tensor:
        """A fake tensor, outside of the device where the device is the CPU and the real one stays in its file."""
        if self._lowering.kind != "cpu" or not self._files.stays_in_file(real):
            return self.known.fake(real)
        with outside_the_device():
            fake = self.known.fake(real)
            self.recorder.know([("", fake)], category)  # which notes where it lies
        return fake

    def _loaded(self, real: Tensor) -> Tensor:
        return self._lowering.loaded(self.known.fake(real))

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


_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def dry_run(lowering: Lowering, phase: Callable[[], Phase] | None = None, keeps_all: bool = True) -> Iterator[DryRun]:
    """Run the block on fake tensors, with the kernels of the target, and record it.

    Kernels are replaced in the whole process: one dry run waits for another, and other threads must not use torch
    meanwhile. Random numbers are afterwards as they were.

    Args:
        lowering: the target.
        phase: asked for the phase of the training; ``None`` infers it.
        keeps_all: see `KnownValues`.

    Raises:
        InputError: if an op in the block has no fake version, or needs values that are not known.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        place = DryRun(lowering, phase, keeps_all)
        try:
            with (
                _quiet(),
                _few_collections(),
                untraced(),
                lowering.active(place.known.assume),
                place.mode,
                place.recorder,
            ):
                yield place
        except _CANNOT_TRACE as error:
            raise InputError(_cannot_trace(error, place.recorder.describe_place())) from error


def trace_training(train: Callable[[DryRun], Any], lowering: Lowering, name: str = "the training") -> Trace:
    """Trace a function that trains; every ``optimizer.step()`` ends a step.

    Args:
        train: does a few steps; from the third on they are alike. It is run twice where lengths are not known.
        lowering: the target.
        name: of the function, for a message.

    Raises:
        InputError: if the function fails, or cannot be traced.
    """

    def trace_with(keeps_all: bool) -> Trace:
        with dry_run(lowering, keeps_all=keeps_all) as place:
            place.recorder.step, place.recorder.counts_steps = 1, True
            with failures_explained(name, place):
                train(place)
        return place.trace()

    return with_unknown_lengths(trace_with)


def with_unknown_lengths(trace_with: Callable[[bool], Trace]) -> Trace:
    """Trace with results of unknown length as long as they can be, and say how much less it is with the shortest.

    Args:
        trace_with: traces, as long as can be or (``False``) with one element.
    """
    trace = trace_with(True)
    unknown = [number for number, one in enumerate(trace.assumptions) if KEEPS_ALL in one.text]
    if not unknown:
        return trace
    less_bytes = live_bytes(trace).peak_bytes - live_bytes(trace_with(False)).peak_bytes
    assumptions = list(trace.assumptions)
    assumptions[unknown[0]] = assumptions[unknown[0]].model_copy(update={"low_bytes": -max(less_bytes, 0)})
    return trace.model_copy(update={"assumptions": tuple(assumptions)})


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


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let Python look for garbage among young objects only: to look at all that libraries have made takes 0.3 s."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


class failures_explained:
    """Let an error of the user's code say what failed and where, in their frames only.

    A class, because it must see errors of any type on their way out; none is held back.
    """

    def __init__(self, what: str, place: DryRun) -> None:
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
            f"{type(error).__name__}: {error}\n{shown}To go on: check the model and the fields of its batch."
        ) from error


def _cannot_trace(error: Exception, where: str) -> str:
    return (
        f"cannot trace this training without running it: {error}{where} has no version for fake tensors, or its "
        "result depends on values that are not known: give the op one (torch.library.register_fake), or use another"
    )


_MODULE, _NAME = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def untraced() -> Iterator[None]:
    """Let fake tensors pass for real ones; undone on exit. A library counts if it is imported when the block begins."""
    # transformers 5 asks whether a tensor is fake, and if so does not look at its values: it builds the attention mask
    # also where nothing is masked, and takes another attention kernel. Here the values of masks are known (`known`).
    module = sys.modules.get(_MODULE)
    asked = getattr(module, _NAME, None)
    if module is None or asked is None:
        yield
        return
    setattr(module, _NAME, lambda value: False)
    try:
        yield
    finally:
        setattr(module, _NAME, asked)
