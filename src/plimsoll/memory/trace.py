"""Tracing of a training run on fake tensors: nothing is computed or allocated, but every allocation is recorded.

    trace = trace_training(train_three_steps, CudaLowering((8, 6)))

The function builds the model, or gets a copy from `fake_model`, and trains it for a few steps with plain PyTorch code.
The code runs unchanged, on torch's fake tensors. While it runs, ops that differ on the target are replaced (see
`lowering.base`). Tensor values that the code reads are either known or recorded as assumptions (see `known_values`).

Supports every module and training function whose ops have a fake version. Among them are Hugging Face models, packed
sequences, checkpointing and custom autograd functions.

Does NOT cover torch.compile, CUDA graphs of user code, several devices, and tensors made by libraries outside torch.
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
    """A recorded training run on fake tensors, created by `dry_run`.

    Attributes:
        recorder: the recorder, whose phase and step the caller may set if they cannot be inferred.
        folds_blocks: whether one recorded block may stand for identical blocks of a model.
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
        """Return a copy of a model with fake parameters and buffers. The model does not change.

        Args:
            model: the model.
            outside: tensors of the model that are not in device memory.
        """
        return self._arrived(copy.deepcopy(model, self._faked(model, frozenset(map(id, outside)))))

    def fake_training(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return fake copies of a model and its optimizer that refer to each other, with fake optimizer states."""
        memo = self._faked(model)
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    # torch keeps the step count on the host, and for a CPU model it has to stay there.
                    is_on_host = key == "step" and value.device.type == "cpu"
                    memo[id(value)] = self._loaded(value) if is_on_host else self._fake(value, "optimizer states")
        return self._arrived(copy.deepcopy(model, memo)), copy.deepcopy(optimizer, memo)

    def fake_batch(self, batch: Any) -> Any:
        """Return a batch of fake tensors in host memory, as a data loader returns it; integer values stay known.

        A tensor that occurs twice in the batch is one fake tensor in the result.
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
        """Return the trace recorded so far."""
        return self.recorder.trace("predicted", self._lowering.name, self.known.assumptions)

    def _faked(self, model: nn.Module, outside: Collection[int] = ()) -> dict[int, Any]:
        """Return a ``copy.deepcopy`` memo that maps the id of each tensor of a model to its fake tensor."""
        memo: dict[int, Any] = {}
        # Modules also keep tensors as plain attributes, masks for example.
        plain = (leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor))
        for tensor in chain(model.parameters(), model.buffers(), plain):
            if id(tensor) in memo:
                continue
            with outside_the_device() if id(tensor) in outside else nullcontext():
                fake = with_parts(tensor, self._fake).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                fake._is_param = True  # nn.Parameter does the same for a subclass
            memo[id(tensor)] = fake
        return memo

    def _fake(self, real: Tensor, category: Category = "parameters") -> Tensor:
        """Return a fake tensor for a real one. On the CPU, a memory-mapped tensor counts as outside the device."""
        if self._lowering.kind != "cpu" or not self._files.stays_in_file(real):
            return self.known.fake(real)
        with outside_the_device():
            fake = self.known.fake(real)
            self.recorder.know([("", fake)], category)  # records that the tensor is outside the device
        return fake

    def _loaded(self, real: Tensor) -> Tensor:
        return self._lowering.loaded(self.known.fake(real))

    @staticmethod
    def _arrived(model: nn.Module) -> nn.Module:
        """Flatten the weights of cuDNN's recurrent layers, as ``model.to(device)`` does, and return the model."""
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        return model

    def _where(self) -> str | None:
        """Return the code location that reads an unknown value; ``None`` in Plimsoll's step, which reads losses."""
        if self._is_step and not self.recorder.is_in_module:
            return None
        return self.recorder.describe_place()


_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def dry_run(lowering: Lowering, phase: Callable[[], Phase] | None = None, keeps_all: bool = True) -> Iterator[DryRun]:
    """Run the block on fake tensors with the target's kernels, and record it.

    Kernels are replaced in the whole process. Dry runs therefore wait for each other, and other threads must not use
    torch meanwhile. The state of the random number generators is restored.

    Args:
        lowering: the target.
        phase: returns the phase of the training; ``None`` infers it.
        keeps_all: whether results of unknown length keep all elements, see `KnownValues`.

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
    """Trace a function that trains. Every ``optimizer.step()`` ends a step.

    Args:
        train: trains for a few steps; from the third on, all steps are alike. It runs twice if lengths are unknown.
        lowering: the target.
        name: the name of the function in messages.

    Raises:
        InputError: if the function fails or cannot be traced.
    """

    def trace_with(keeps_all: bool) -> Trace:
        with dry_run(lowering, keeps_all=keeps_all) as place:
            place.recorder.step, place.recorder.counts_steps = 1, True
            with failures_explained(name, place):
                train(place)
        return place.trace()

    return with_unknown_lengths(trace_with)


def with_unknown_lengths(trace_with: Callable[[bool], Trace]) -> Trace:
    """Trace a training in which the lengths of some results, such as a boolean selection, depend on unknown values.

    The trace has the longest results. If there are such results, a second trace with the shortest ones gives the lower
    end of the peak's range.

    Args:
        trace_with: traces with the longest results (``True``), or with results of one element (``False``).
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
    """Silence expected warnings, and torch's log message about an error that is raised as well."""
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
    """Disable garbage collection of the oldest generation: it takes 0.3 s to traverse the objects of the libraries."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


class failures_explained:
    """Context manager that replaces an error of user code by an explanation with the user's frames.

    This is a class because it must see errors of any type, and it suppresses none.
    """

    def __init__(self, what: str, place: DryRun) -> None:
        self._what, self._place = what, place

    def __enter__(self) -> None:
        """Enter the context."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Raise the explanation instead of an error, unless the error is Plimsoll's or about fake tensors."""
        if not isinstance(error, Exception) or isinstance(error, (PlimsollError, *_CANNOT_TRACE)):
            return
        frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_INNER_FOLDERS)]
        shown = "".join(traceback.format_list(frames[-_MOST_FRAMES:]))
        raise InputError(
            f"{self._what} fails in the {self._place.recorder.last_phase} phase, on fake tensors: "
            f"{type(error).__name__}: {error}\n{shown}To fix it: check the model and the fields of its batch."
        ) from error


def _cannot_trace(error: Exception, where: str) -> str:
    return (
        f"cannot trace this training on fake tensors: {error}{where} has no fake version, or its result depends on "
        "unknown values: give the op one with torch.library.register_fake, or use another op"
    )


_MODULE, _NAME = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def untraced() -> Iterator[None]:
    """Make transformers treat fake tensors as real ones inside the block, if transformers is already imported."""
    # transformers 5 checks whether a tensor is fake, and then ignores its values. It builds the attention mask even
    # without padding, and selects another attention kernel. Here, the values of masks are known (`known_values`).
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
