"""The evidence of an exception in a live process: the owner of every storage, and the values that user variables keep.

The result is numbers and text, so it keeps no object of the process alive. Not handled: memory that was freed before
the error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import FrameType
from typing import Any
from weakref import ref

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plimsoll.device import aborts, watched
from plimsoll.device.base import Backend, backend_for
from plimsoll.device.oom_errors import requested_bytes
from plimsoll.device.watched import lines_of
from plimsoll.diagnose.copies import copies_in
from plimsoll.diagnose.evidence import Evidence, Kept, Seen
from plimsoll.diagnose.frames import Line, frames_of, users_callers, users_lines
from plimsoll.diagnose.holders import CONTAINERS, Found, found_in, kept_by, lengths_of, stored
from plimsoll.diagnose.parse.event import event_of
from plimsoll.diagnose.request import Asked, tensor_asked, tensors_at_hand
from plimsoll.memory.autograd_graph import storage_key
from plimsoll.memory.inventory import Inventory, Piece, inventory_begun
from plimsoll.records.diagnosis import ASKED, Share
from plimsoll.records.oom_text import OomText
from plimsoll.records.prediction import Holding, Moment

KEPT, OBJECTS, BASELINE, UNSEEN = "kept by variables", "Python objects", "baseline", "not seen"
_OF_WORKER = "DataLoader worker"
_ON_CUDA = ("cuda", "hip", "cublas", "cudnn", "nccl")
_MOST_HOLDINGS = 20


@dataclass
class Before:
    """Observations from before memory ran out.

    Attributes:
        lengths: number of items of each container, by its ``id``.
        tensors: tensors that variables held at the start of the block or after the first step. Later tensors may be
            batches.
        used_bytes: step numbers, and the bytes in use after each.
        borders: number of operations that autograd had recorded at the end of each step.
        births: the line of user code that made each tensor, by the tensor's address.
        num_steps: number of finished steps.
        baseline_bytes: bytes in use at the start of the block, without tensors.
    """

    lengths: dict[int, int] = field(default_factory=dict)
    tensors: list[ref[Tensor]] = field(default_factory=list)
    used_bytes: list[tuple[int, int]] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)
    births: Mapping[int, str] = field(default_factory=dict)
    num_steps: int = 0
    baseline_bytes: int = 0

    def look_at(self, frames: Iterable[FrameType]) -> None:
        """Record the values that the variables of these frames hold now: their numbers of items, and their tensors."""
        found = list(found_in(frames))
        self.lengths |= lengths_of(found)
        self.tensors += [ref(tensor) for one in found for tensor in _tensors_of(one.value)]


@dataclass
class _Scene:
    """The frames at the error, their lines of user code, and the values that their variables keep alive."""

    frames: list[tuple[FrameType, int]]
    lines: list[Line]
    found: list[Found]

    @property
    def phase(self) -> str:
        """The phase of the training step in which memory ran out: ``"forward"``, ``"backward"`` or ``"optimizer"``."""
        for frame, _ in self.frames:
            name, path = frame.f_code.co_name, frame.f_code.co_filename
            if name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
                return "optimizer"
            if name == "backward" and path.endswith(("_tensor.py", "autograd/__init__.py")):
                return "backward"
        return "forward"

    def assignment_of_variable(self, kind: type) -> tuple[Found, Any] | None:
        """Return a user variable that holds an object of type ``kind``, and the object; ``None`` if none is found."""
        for line in self.lines:
            for scope in (line.frame.f_locals, line.frame.f_globals):
                for name, value in list(scope.items()):
                    if isinstance(value, kind):
                        return Found(name, name, (line.frame.f_code,), value), value
        return None

    def line_of_variable(self, kind: type) -> str:
        """Return the line that assigns the user variable for an object of type ``kind``; "" if it is unknown."""
        variable = self.assignment_of_variable(kind)
        return "" if variable is None else stored(variable[0]).place


def backend_of(error: BaseException) -> tuple[Backend, str] | None:
    """Return the backend on which memory ran out and the family of the error; ``None`` if memory did not run out."""
    on_host = backend_for("cpu")
    uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    backend = backend_for(f"cuda:{torch.cuda.current_device()}") if uses_cuda else on_host
    family = backend.oom_family(error)
    if family is None:
        return None
    return (backend if family.startswith(_ON_CUDA) else on_host), family


def evidence_of_error(error: BaseException, backend: Backend, before: Before, caller: FrameType | None) -> Evidence:
    """Return the evidence in a process whose memory has run out.

    Args:
        error: the exception, with its traceback.
        backend: the backend on which memory ran out.
        before: observations from before memory ran out.
        caller: the frame that contains the `explained` block or called the decorated function.
    """
    frames = frames_of(error.__traceback__)
    lines = [*users_lines(frames), *users_callers(caller)]
    scene = _Scene(frames, lines, found_in(line.frame for line in lines))
    event = _event(error, lines)
    stock = inventory_begun(backend.kind)
    kept = _kept(scene, stock, before)
    stock.claim_rest()
    asked = tensor_asked(event.tried_to_allocate, tensors_at_hand(_innermost(frames, lines)))
    used_bytes = backend.use().used_bytes
    asked_bytes = event.tried_to_allocate or 0
    evidence = Evidence(
        subject=type(error).__name__,
        kind=backend.kind,
        first_step=before.used_bytes[0][0] - 1 if before.used_bytes else before.num_steps,
        last_step=before.num_steps,
        used_bytes=tuple(before.used_bytes),
        peak_bytes=used_bytes + (_missing_states_bytes(scene) or asked_bytes),
        event=event,
        has_run_out=True,
        limit_bytes=_limit_bytes(backend),
        requested_bytes=event.tried_to_allocate,
        asked_category=_asked_category(scene, stock),
        phase=scene.phase,
        sequence_length=_sequence_length(stock, asked),
        vocab_size=_vocab_size(stock),
        seen=_seen(scene, kept, stock, str(error)),
    )
    holdings = _holdings(stock, scene, asked, before)
    shares = _shares(stock, used_bytes, evidence, scene, before)
    return replace(evidence, holdings=holdings, shares=shares)


def _event(error: BaseException, lines: list[Line]) -> OomText:
    text = f"{type(error).__name__}: {error}"
    event = event_of(text)
    place, code = (lines[0].place, lines[0].code) if lines else ("", "")
    stated_bytes = event.tried_to_allocate or requested_bytes(text)
    return event.model_copy(update={"place": place, "code": code, "tried_to_allocate": stated_bytes})


def _limit_bytes(backend: Backend) -> int:
    """Return the bytes that this process may use, without the untouched memory that ``RLIMIT_DATA`` also counts."""
    capacity_bytes, use = backend.probe().capacity_bytes, backend.use()
    if backend.kind != "cpu":
        return capacity_bytes
    capacity_bytes = min(capacity_bytes, use.limit_bytes or capacity_bytes)
    return max(0, capacity_bytes - max(0, use.reserved_bytes - use.used_bytes))


def _missing_states_bytes(scene: _Scene) -> int:
    """Return the bytes of states that the optimizer had not yet allocated when memory ran out in its first update."""
    frame = next((frame for frame, _ in scene.frames if frame.f_code.co_name == "_init_group"), None)
    optimizer = frame.f_locals.get("self") if frame is not None else None
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    num_states = max((_num_states(optimizer, one) for one in parameters), default=0) or 1
    missing = [(num_states - _num_states(optimizer, one)) * one.numel() * one.dtype.itemsize for one in parameters]
    return sum(missing)


def _num_states(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    """Return the number of states of a parameter that have the parameter's shape."""
    state = optimizer.state.get(parameter, {})
    return sum(isinstance(one, Tensor) and one.shape == parameter.shape for one in state.values())


def _innermost(frames: list[tuple[FrameType, int]], lines: list[Line]) -> list[FrameType]:
    """Return the frames from the line that failed outwards, up to and including the first frame of user code."""
    users = lines[0].frame if lines else None
    numbers = [number for number, (frame, _) in enumerate(frames) if frame is users]
    return [frame for frame, _ in frames[: numbers[0] + 1 if numbers else 1]]


def _kept(scene: _Scene, stock: Inventory, before: Before) -> list[Kept]:
    """Return the values that user variables keep alive, largest first.

    Also assigns the storages of these values to categories in ``stock``, the inventory of the device's memory.
    """
    copies = copies_in(scene.found, [line.frame for line in scene.lines], stock)
    roots = {id(copy.root.value) for copy in copies}
    used = stock.claimed()
    stock.claim((one for copy in copies for one in copy.tensors), KEPT)
    found = [one for one in scene.found if id(one.root_value) not in roots]
    kept = kept_by(found, before.lengths, before.borders, stock.kind, used)
    given = stock.saved_by_graphs() | {storage_key(one) for one in _given_to_modules(scene)}
    stays = {id(one) for known in before.tensors if (one := known()) is not None and storage_key(one) not in given}
    for category, tensors in _named(found, kept, stays).items():
        stock.claim(tensors, category)
    return sorted([*kept, *(copy.kept() for copy in copies)], key=lambda one: -one.num_bytes)


def _given_to_modules(scene: _Scene) -> Iterator[Tensor]:
    """Yield the tensors in local variables of the modules that were running when memory ran out."""
    for frame, _ in scene.frames:
        if isinstance(frame.f_locals.get("self"), nn.Module):
            yield from (one for value in list(frame.f_locals.values()) for one in _tensors_of(value))


def _named(all_found: list[Found], kept: list[Kept], stays: set[int]) -> dict[str, list[Tensor]]:
    """Group tensors that user variables hold by category: `KEPT` (tensors that stay alive) and ``"inputs"`` (batches).

    Tensors in growing containers, in data sets and in ``stays`` are `KEPT`. Other tensors are batches. Tensors that
    require a gradient are omitted, except in growing containers and data sets.

    Args:
        all_found: all values that variables hold.
        kept: the values among them that are reported, with their growth.
        stays: ids of tensors that variables already held at the start or after the first step.
    """
    many = {one.name for one in kept if one.num_items > 2 and (one.has_grown or one.is_of_data)}
    tensors: list[Tensor] = []
    batch: list[Tensor] = []
    for found in all_found:
        for one in _tensors_of(found.value):
            if found.name in many or (id(one) in stays and not one.requires_grad):
                tensors.append(one)
            elif not one.requires_grad:
                batch.append(one)
    return {KEPT: tensors, "inputs": batch}


def _tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value: the tensor itself, or those items of a container that are tensors."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, CONTAINERS) else ()
    return [one for one in items if isinstance(one, Tensor)]


def _vocab_size(stock: Inventory) -> int | None:
    """Return the number of rows of the largest embedding; ``None`` without an embedding.

    This is taken as the size of the vocabulary, because the output layer usually has as many rows.
    """
    tables = [one.num_embeddings for one in stock.modules if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    return max(tables, default=None)


def _sequence_length(stock: Inventory, asked: Asked | None) -> int | None:
    """Return the sequence length, guessed from attention scores; ``None`` if no tensor looks like them.

    This is the last dimension of the largest tensor of shape (..., n, n) with at least three dimensions.
    """
    free = {"activations", "temporaries"}
    shapes = [(one.num_bytes, one.shape) for one in stock.pieces if one.category in free]
    shapes += [(prod(asked.shape) * asked.dtype.itemsize, asked.shape)] if asked else []
    squares = [(size, shape) for size, shape in shapes if len(shape) > 2 and shape[-1] == shape[-2] > 1]
    return max(squares)[1][-1] if squares else None


def _asked_category(scene: _Scene, stock: Inventory) -> str:
    """Return the category of the tensor that could not be allocated.

    This is "" for the first states of an optimizer, because their missing bytes are counted with the other states.
    """
    names = {frame.f_code.co_name for frame, _ in scene.frames}
    if scene.phase == "optimizer":
        return "" if "_init_group" in names else "temporaries"
    records = any(one.category == "activations" for one in stock.pieces)
    return "activations" if scene.phase == "forward" and records else "temporaries"


def _shares(stock: Inventory, used_bytes: int, evidence: Evidence, scene: _Scene, before: Before) -> tuple[Share, ...]:
    kept = evidence.seen.kept if evidence.seen is not None else ()
    sizes = Counter[str]()
    places: dict[str, str] = {}
    for piece in sorted(stock.pieces, key=lambda piece: -piece.num_bytes):
        sizes[piece.category] += piece.num_bytes
        if piece.address in before.births:
            places.setdefault(piece.category, before.births[piece.address])
    if evidence.kind == "cpu":
        sizes[OBJECTS] = sum(one.host_bytes for one in kept)
    rest_bytes = max(0, used_bytes - sum(sizes.values()))
    if evidence.requested_bytes:
        if evidence.asked_category:
            sizes[ASKED] = evidence.requested_bytes
            places[ASKED] = scene.lines[0].place if scene.lines else ""
        else:
            sizes["optimizer states"] += _missing_states_bytes(scene) or evidence.requested_bytes
    sizes[BASELINE] = min(rest_bytes, before.baseline_bytes)
    sizes[UNSEEN] = rest_bytes - sizes[BASELINE]
    for one in kept:
        places.setdefault(KEPT if one.tensor_bytes > one.host_bytes else OBJECTS, one.place)
    for category, kind in (("optimizer states", torch.optim.Optimizer), ("parameters", nn.Module)):
        if category in sizes:
            places.setdefault(category, scene.line_of_variable(kind))
    return tuple(
        Share(
            category=name,
            num_bytes=size,
            known="measured" if name in (BASELINE, UNSEEN, ASKED) else "counted",
            place=places.get(name, ""),
        )
        for name, size in sizes.most_common()
        if size
    )


def _holdings(stock: Inventory, scene: _Scene, asked: Asked | None, before: Before) -> tuple[Holding, ...]:
    """Return the largest tensors alive, grouped by category, shape and origin, and the tensor that was requested."""
    groups: dict[tuple[Any, ...], list[Piece]] = {}
    model = scene.line_of_variable(nn.Module)
    lines = {"parameters": model, "gradients": model, "optimizer states": scene.line_of_variable(torch.optim.Optimizer)}
    for piece in (one for one in stock.pieces if one.category != KEPT):
        place = before.births.get(piece.address, "") or lines.get(piece.category, "")
        groups.setdefault((piece.category, piece.shape, piece.dtype, piece.op, place), []).append(piece)
    found = [_holding(key, sum(one.num_bytes for one in own), len(own)) for key, own in groups.items()]
    if asked is not None and scene.lines:
        category = _asked_category(scene, stock) or "optimizer states"
        key = (category, asked.shape, asked.dtype, _op_asked(scene), scene.lines[0].place)
        found.append(_holding(key, prod(asked.shape) * asked.dtype.itemsize, 1))
    return tuple(sorted(found, key=lambda one: -one.num_bytes)[:_MOST_HOLDINGS])


def _op_asked(scene: _Scene) -> str:
    """Return the line of code that failed, in lower case. It stands in for the unknown name of the failed operation."""
    return scene.lines[0].code.lower()


def _holding(key: tuple[Any, ...], num_bytes: int, number: int) -> Holding:
    category, shape, dtype, op, place = key
    text = f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    made = Moment(step=0, phase="forward", op=op, module="", line=place)
    return Holding(num_bytes=num_bytes, count=number, category=category, shape=text, made=made)


def _seen(scene: _Scene, kept: list[Kept], stock: Inventory, text: str) -> Seen:
    family = watched.family_of(psutil.Process().pid)
    processes = tuple(one for one in family if one.pid not in aborts.watcher_pids())
    models = [one for one in stock.modules if any(True for _ in one.parameters(recurse=False))]
    loader = scene.assignment_of_variable(DataLoader)
    caller = _caller_of_model(scene)
    return Seen(
        kept=tuple(kept),
        is_evaluating=bool(models) and not any(one.training for one in models),
        records_graph=stock.bytes_of("activations") > 0,
        evaluation_place=caller.place if caller else "",
        processes=processes,
        is_of_worker=_OF_WORKER in text,
        loader=None if loader is None else _of_variable(loader[0]),
        num_workers=0 if loader is None else loader[1].num_workers,
        lines=tuple(line for line in lines_of(processes) if line.kind == "cgroup"),
        machine_bytes=psutil.virtual_memory().total,
    )


def _of_variable(found: Found) -> Kept:
    return Kept(name=found.name, kind=type(found.value).__name__, **stored(found)._asdict())


def _caller_of_model(scene: _Scene) -> Line | None:
    """Return the innermost line of user code outside all methods of modules, which is the line that called the model.

    ``None`` if there is no such line.
    """
    return next((one for one in scene.lines if not isinstance(one.frame.f_locals.get("self"), nn.Module)), None)
