"""Recorder of all allocations of a training run: every op, and every storage with its birth, death and category.

A `Recorder` intercepts each op below autograd. It works on fake tensors, for a prediction that allocates nothing, and
on real tensors, for a measurement. The two records can be compared op by op.

Not seen: memory that a kernel allocates and frees inside one op (the lowering adds known sizes), and ops in other
threads. CUDA runs backward in another thread, so use the allocator's counters there.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.device.off_device import is_outside
from plimsoll.memory.annotations import Beside, is_captured, stretches
from plimsoll.memory.autograd_graph import Graphs, calls_by_itself
from plimsoll.memory.dispatch_gaps import accumulating_in_place, noting_resizes
from plimsoll.memory.lowering.base import NO_SCRATCH, Made, Run, ScratchBytes, Unwritten, tensors_of
from plimsoll.memory.work import NO_WORK, WorkCounter, hearing
from plimsoll.records.trace import Assumption, Category, OpTable, Phase, StorageTable, Trace
from plimsoll.weights.parts import plain_parts

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_OWN_FOLDER = os.path.dirname(__file__) + os.sep
_DEVICE_OF = torch.ops.prim.device.default
_IS_SAME_SIZE = torch.ops.aten.is_same_size.default
_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records ops and storages while it is active (``with recorder:``).

    `trace` returns the record. A module is named by its qualified name in the outermost module whose forward is
    running.

    Args:
        phase: returns the phase outside of backward. With ``None``, the phase is inferred from module and optimizer
            hooks, which also record optimizer states. If an optimizer does not call hooks, use `know_optimizer`.
        run: executes an op; ``None`` calls it directly.
        scratch_bytes: returns the scratch memory of the target's kernels; ``None`` for no scratch memory.
        on_host: returns whether a tensor is in host memory; ``None`` if there is only one memory. Tensors made under
            `outside_the_device` always count as host memory.
        unwritten: returns which result of an op is never written in full; ``None`` if every result is written.
        made: returns the tensors among an op's results, in the order in which the target allocates them.

    Attributes:
        step: the current step, counted from 1; 0 during setup.
        counts_steps: whether every ``optimizer.step()`` increments ``step``.
    """

    def __init__(
        self,
        phase: Callable[[], Phase] | None = None,
        run: Run | None = None,
        scratch_bytes: ScratchBytes | None = None,
        on_host: Callable[[Tensor], bool] | None = None,
        unwritten: Unwritten | None = None,
        *,
        made: Made = tensors_of,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = 0
        self.counts_steps = False
        self._ask_phase = phase
        # While a dispatch mode is active, autograd accumulates gradients out of place, even for real tensors.
        self._run = accumulating_in_place(run or (lambda op, args, kwargs: op(*args, **kwargs)))
        self._scratch_bytes = scratch_bytes or (lambda op, args, kwargs: NO_SCRATCH)
        self._made = made
        self._on_host = on_host or (lambda tensor: False)
        self._unwritten = unwritten or (lambda op, args, result: None)
        self._graphs = Graphs()
        self.beside = Beside(lambda: self.op_row)
        self._names: dict[nn.Module, str] = {}
        self._watched: set[Tensor] = set()
        self._parameter_names: dict[Tensor, str] = {}
        self._modules: list[int] = []
        self._evaluates = False
        self._optimizers_running = 0
        self._made_graph = False  # since the last backward or update; tells the phase "loss" from "copy"
        self._num_nodes = torch._C._autograd._get_sequence_nr()
        self._forced_phase: list[Phase] = []
        self._texts: dict[str, int] = {"": 0}
        self._op_names: dict[Any, int] = {}
        self._code_is_inside: dict[CodeType, bool] = {}
        self._forward_of: dict[int, tuple[int, int]] = {}  # sequence number of autograd -> module, line
        self._storages = _Storages(self)
        self._ops: tuple[list[Any], ...] = ([], [], [], [], [], [])  # name, module, line, step, by autograd, captured
        self._work: tuple[list[Any], ...] = ([], [], [], [])  # flops, moved bytes, outside bytes, dtype
        self._counter = WorkCounter(lambda tensor: self._on_host(tensor) or self._storages.is_outside(tensor))
        self._phases: list[Phase] = []
        self._stack = ExitStack()

    # -- calls from the training
    # -----------------------------------------------------------------------------------------

    def know(self, tensors: Iterable[tuple[str, Tensor]], category: Category) -> None:
        """Record the category and names of tensors, including tensors that were made before recording began.

        Args:
            tensors: ``(name, tensor)`` pairs.
            category: the category of all these tensors.
        """
        if not self._phases:
            self._begin_op("before the first step")
        for name, tensor in tensors:
            for part in plain_parts(tensor).values():
                self._storages.see(part)
                self._storages.mark(part, category, name)

    def know_model(self, model: nn.Module) -> None:
        """Record a model's parameters and buffers, and the names of its modules."""
        for name, module in model.named_modules():
            self._names.setdefault(module, name or type(model).__name__)
        self.know(model.named_parameters(), "parameters")
        self.know(model.named_buffers(), "buffers")
        for name, parameter in model.named_parameters():
            self._parameter_names[parameter] = name
            if parameter.requires_grad and parameter not in self._watched:
                self._watched.add(parameter)
                handle = parameter.register_post_accumulate_grad_hook(self.know_gradient)  # type: ignore[no-untyped-call]
                self._stack.callback(handle.remove)

    def know_teacher(self, model: nn.Module) -> None:
        """Record a distillation teacher. The names of its modules and tensors begin with ``teacher``."""
        for name, module in model.named_modules():
            self._names.setdefault(module, f"teacher.{name}" if name else "teacher")
        self.know(((f"teacher.{name}", one) for name, one in model.named_parameters()), "parameters")
        self.know(((f"teacher.{name}", one) for name, one in model.named_buffers()), "buffers")

    def know_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the states of an optimizer."""
        for parameter, state in optimizer.state.items():
            of = self._parameter_names.get(parameter, "a parameter")
            tensors = ((f"{key} of {of}", value) for key, value in state.items() if isinstance(value, Tensor))
            self.know(tensors, "optimizer states")

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Set the phase of the training inside the block."""
        self._forced_phase.append(phase)
        try:
            yield
        finally:
            self._forced_phase.pop()

    def trace(self, source: Any, lowered_to: str, assumptions: tuple[Assumption, ...] = ()) -> Trace:
        """Return the record as a trace.

        Args:
            source: ``"predicted"`` or ``"measured"``.
            lowered_to: the name of the target.
            assumptions: assumptions that were made while recording.
        """
        columns = dict(zip(("name", "module", "line", "step", "by_autograd"), map(tuple, self._ops[:-1]), strict=True))
        work = dict(zip(("flops", "moved_bytes", "outside_bytes", "dtype"), map(tuple, self._work), strict=True))
        table, events, event_ops = self._storages.tables(self._phases)
        return Trace(
            source=source,
            lowered_to=lowered_to,
            texts=tuple(self._texts),
            ops=OpTable(phase=tuple(self._phases), **columns, **work),
            storages=table,
            events=events,
            event_op=event_ops,
            assumptions=assumptions,
            unwritten=self._storages.unwritten(),
            nodes=self._graphs.nodes(),
            **self.beside.columns(),
            captured=stretches(self._ops[-1]),
        )

    # -- calls from torch
    # ------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because nothing is compiled here.

        With True, torch would switch its compiler off and on around each op.
        """
        return False

    def __enter__(self) -> Recorder:
        self._stack.enter_context(hearing())
        self._stack.enter_context(noting_resizes(self._storages.resized))
        handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        if self._ask_phase is None:
            handles.append(register_optimizer_step_pre_hook(self._enter_optimizer))
            handles.append(register_optimizer_step_post_hook(self._leave_optimizer))
        for handle in handles:
            self._stack.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op and record its results."""
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:  # called more often than all ops
            return args[0].device
        if types != (FakeTensor,) and any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # the op is dispatched again with this rank's shard
        kwargs = kwargs or {}
        if func is _DEVICE_OF or func is _IS_SAME_SIZE:  # queries about fake tensors, without memory
            return func(*args, **kwargs)
        self._begin_op(func)
        row = self.op_row
        self._graphs.see(row)
        scratch = self._scratch_bytes(func, args, kwargs)
        self._storages.begin_scratch(scratch.before)
        result = self._run(func, args, kwargs)
        for tensor in self._made(func, result):
            self._storages.see(tensor)
        if scratch is not NO_SCRATCH:
            self._storages.begin_scratch(scratch.after)
            self._storages.end_scratch()
        unwritten = self._unwritten(func, args, result)
        if unwritten is not None:
            self._storages.note_unwritten(*unwritten)
        self._note_work(row, func, args, kwargs, result)
        return result

    def describe_place(self) -> str:
        """Return the current source line or module as a suffix for a message; "" if unknown."""
        texts = list(self._texts)
        module, line = (column[-1] for column in self._ops[1:3]) if self._phases else (0, 0)
        return f" at {texts[line]}" if line else f" in {texts[module]}" if module else ""

    @property
    def last_phase(self) -> Phase:
        """Phase of the last op."""
        return self._phases[-1] if self._phases else "setup"

    @property
    def is_in_module(self) -> bool:
        """True while a module's forward is running or being recomputed."""
        return bool(self._modules)

    @property
    def op_row(self) -> int:
        """Row of the current op."""
        return len(self._phases) - 1

    def note_again(self, begin: int, num_times: int) -> None:
        """Append the ops from row ``begin`` on to the record ``num_times`` more times, without their storages."""
        self.beside.note_again(begin, num_times)
        for column in (*self._ops, *self._work):
            column.extend(column[begin:] * num_times)
        self._phases.extend(self._phases[begin:] * num_times)

    def text(self, text: str) -> int:
        """Return the index of a text in the record's table of texts, and add the text if it is new."""
        return self._texts.setdefault(text, len(self._texts))

    def on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor that was just made is outside device memory."""
        return is_outside() or self._on_host(tensor)

    def _begin_op(self, op: Any) -> None:
        name = self._op_names.get(op)
        if name is None:
            name = self._op_names[op] = self.text(str(op))
        module, line, phase = self._where()
        row = name, module, line, self.step, calls_by_itself(), is_captured(), 0, 0, 0, 0
        for column, value in zip((*self._ops, *self._work), row, strict=True):
            column.append(value)
        self._phases.append(phase)

    def _note_work(self, row: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        work = self._counter.count(op, args, kwargs, result)
        if work is not NO_WORK:
            flops, moved_bytes, outside_bytes, dtypes = self._work
            flops[row], moved_bytes[row], outside_bytes[row], dtypes[row] = *work[:3], self.text(work.dtype)

    def _where(self) -> tuple[int, int, Phase]:
        # These private functions give the backward pass and node running in this thread, and the number of the next
        # node.
        if torch._C._current_graph_task_id() == -1:
            module, line = self._modules[-1] if self._modules else 0, self._line()
            if torch.is_grad_enabled():
                num_nodes = torch._C._autograd._get_sequence_nr()
                self._made_graph |= num_nodes != self._num_nodes
                self._num_nodes = num_nodes
                self._forward_of.setdefault(num_nodes - 1, (module, line))
            return module, line, self._phase_outside_backward()
        # In backward, an op belongs to the forward op whose gradient it computes. Autograd gives both the same number.
        self._made_graph, self._num_nodes = False, torch._C._autograd._get_sequence_nr()
        node = torch._C._current_autograd_node()
        module, line = self._forward_of.get(node._sequence_nr() if node is not None else -1, (0, 0))
        if self._modules:  # a forward is recomputed
            module, line = self._modules[-1], self._line()
            self._forward_of.setdefault(torch._C._autograd._get_sequence_nr() - 1, (module, line))
        return module, line, self._forced_phase[-1] if self._forced_phase else "backward"

    def _phase_outside_backward(self) -> Phase:
        if self._forced_phase:
            return self._forced_phase[-1]
        if self.step == 0:
            return "setup"
        if self._ask_phase is not None:
            return self._ask_phase()
        if self._optimizers_running:
            return "optimizer"
        if self._modules:
            return "evaluation" if self._evaluates else "forward"
        return "loss" if self._made_graph else "copy"

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module not in self._names:
            self.know_model(module)
        if not self._modules:  # inside, custom functions and checkpoints turn gradients off too
            self._evaluates = not torch.is_grad_enabled()
        self._modules.append(self.text(self._names[module]))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers_running += 1
        self._made_graph = False

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers_running -= 1
        self.step += self.counts_steps
        self.know_optimizer(optimizer)

    def know_gradient(self, parameter: Tensor) -> None:
        """Record the gradient of a parameter, if it has one."""
        if parameter.grad is not None:
            self.know(((f"gradient of {self._parameter_names[parameter]}", parameter.grad),), "gradients")

    def _line(self) -> int:
        """Return the index of the text ``file:line`` for the innermost frame outside torch and Plimsoll."""
        frame: FrameType | None = sys._getframe(2)
        inside = self._code_is_inside
        while frame is not None:
            code = frame.f_code
            is_inside = inside.get(code)
            if is_inside is None:
                name = code.co_filename
                is_inside = inside[code] = name.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<"))
            if not is_inside:
                return self.text(f"{code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        return 0


class _Storages:
    """Storages seen so far, identified by the address of torch's storage object.

    A weak reference reports the death of a storage: the moment when no tensor, saved tensor or gradient uses it any
    more.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._row_of: dict[int, int] = {}  # address of a live storage -> row
        self._watch: dict[weakref.ref[Any], tuple[int, int]] = {}
        self._num_bytes: list[int] = []
        self._category: list[Category | None] = []
        self._born: list[int] = []
        self._died: list[int] = []
        self._shape: list[int] = []
        self._name: list[int] = []
        self._on_host: list[bool] = []
        self._has_outside = False
        self._events: list[int] = []
        self._event_op: list[int] = []
        self._scratch_rows: list[int] = []
        self._unwritten: dict[int, int] = {}

    def see(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            for part in _parts_of(tensor):
                self.see(part)
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._row_of:
            return
        num_bytes = storage.nbytes()
        if num_bytes == 0:
            return
        self.take(tensor, self._add(num_bytes, None, _shape_text(tensor), self._recorder.on_host(tensor)))

    def take(self, tensor: Tensor, row: int) -> None:
        """Assign an existing row to a tensor's storage, and record the death of the storage in this row."""
        storage = tensor.untyped_storage()
        self._row_of[storage._cdata] = row
        self._watch[weakref.ref(storage, self._dies)] = (storage._cdata, row)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record the death of a storage that was resized in place, and add a row with the new size."""
        address, num_bytes = storage._cdata, storage.nbytes()
        row = self._row_of.get(address)
        if row is None or num_bytes == (self._num_bytes[row] if self._died[row] < 0 else 0):
            return
        if self._died[row] < 0:
            self._end(row)
        if num_bytes:
            self._row_of[address] = new = self._add(num_bytes, self._category[row], "", self._on_host[row])
            self._shape[new], self._name[new] = self._shape[row], self._name[row]
            self._watch[weakref.ref(storage, self._dies)] = (address, new)

    def mark(self, tensor: Tensor, category: Category, name: str) -> None:
        for part in [tensor] if tensor.layout is torch.strided else _parts_of(tensor):
            row = self._row_of.get(part.untyped_storage()._cdata)
            if row is not None:
                self._category[row] = category
                self._name[row] = self._recorder.text(name)

    def note_unwritten(self, tensor: Tensor, num_bytes: int) -> None:
        row = self._row_of.get(tensor.untyped_storage()._cdata)
        if row is not None:
            self._unwritten[row] = num_bytes

    def unwritten(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._unwritten.items())

    def is_outside(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made outside the device. It must be fast: it runs for each tensor of each op."""
        if not self._has_outside or tensor.layout is not torch.strided:
            return False
        row = self._row_of.get(tensor.untyped_storage()._cdata)
        return row is not None and self._on_host[row]

    def begin_scratch(self, sizes: Sequence[int]) -> None:
        for num_bytes in sizes:
            self._scratch_rows.append(self._add(num_bytes, "temporaries", "scratch of the kernel", on_host=False))

    def end_scratch(self) -> None:
        while self._scratch_rows:
            self._end(self._scratch_rows.pop())

    def tables(self, phases: list[Phase]) -> tuple[StorageTable, tuple[int, ...], tuple[int, ...]]:
        categories = [
            category or _category(phases[born], phases[died] if died >= 0 else None)
            for category, born, died in zip(self._category, self._born, self._died, strict=True)
        ]
        table = StorageTable(
            num_bytes=tuple(self._num_bytes),
            category=tuple(categories),
            born=tuple(self._born),
            died=tuple(self._died),
            shape=tuple(self._shape),
            name=tuple(self._name),
            on_host=tuple(self._on_host),
        )
        return table, tuple(self._events), tuple(self._event_op)

    def _add(self, num_bytes: int, category: Category | None, shape: str, on_host: bool) -> int:
        row, op_row = len(self._num_bytes), self._recorder.op_row
        self._num_bytes.append(num_bytes)
        self._category.append(category)
        self._born.append(op_row)
        self._died.append(-1)
        self._shape.append(self._recorder.text(shape))
        self._name.append(0)
        self._on_host.append(on_host)
        self._has_outside |= on_host
        self._events.append(row + 1)
        self._event_op.append(op_row)
        return row

    def _end(self, row: int) -> None:
        self._died[row] = op_row = self._recorder.op_row
        self._events.append(-row - 1)
        self._event_op.append(op_row)

    def _dies(self, reference: weakref.ref[Any]) -> None:
        address, row = self._watch.pop(reference)
        if self._row_of.get(address) == row:
            del self._row_of[address]
        if self._died[row] < 0:  # it may have ended before, by a resize to 0 bytes
            self._end(row)


def _category(born: Phase, died: Phase | None) -> Category:
    """Return the category of an unnamed storage. Forward results that outlive the phase are activations."""
    if born in ("forward", "loss") and died != born:
        return "activations"
    return "inputs" if born == "copy" else "temporaries"


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a sparse tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return []  # the storage of an mkldnn tensor is not accessible


def _shape_text(tensor: Tensor) -> str:
    return f"{_DTYPES[tensor.dtype]}{list(tensor.shape)}"
