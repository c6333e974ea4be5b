"""What was seen in a process that is still alive when its memory runs out, as plain numbers; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.records.watch import Line, ProcessUse


@dataclass(frozen=True)
class Kept:
    """What one variable or attribute of the user's keeps.

    Attributes:
        name: as the user would write it, such as ``history["loss"]`` or ``model.cache``.
        kind: of the value, such as ``list``.
        num_items: in it; 1 for what is no container.
        num_items_before: as it was first seen, after the first step or before it; ``None`` where it was not there.
        tensor_bytes: the storages of its tensors, each once, without those of parameters.
        graph_bytes: what the graphs of its tensors save for a backward pass, and their nodes.
        host_bytes: of what is no tensor: numbers, texts, arrays.
        is_estimated: whether sizes come from a sample of the items.
        num_graphs: tensors in it that have a graph.
        num_steps_back: how many finished steps the oldest operation of these graphs is older than.
        is_of_data: whether a data set or a loader has it.
        place: the line that stores it, ``file.py:12``; "" where it was not found.
        code: that line.
        remedy: the line without the graph.
        is_made_at_once: whether it was made with all its items, as a batch is, and is no collection that grows.
        copy_of: what of the training it is a copy of, ``"checkpoint"``, ``"weights"`` or ``"model"``; "" for none.
    """

    name: str
    kind: str
    num_items: int = 1
    num_items_before: int | None = None
    tensor_bytes: int = 0
    graph_bytes: int = 0
    host_bytes: int = 0
    is_estimated: bool = False
    num_graphs: int = 0
    num_steps_back: int = 0
    is_of_data: bool = False
    place: str = ""
    code: str = ""
    remedy: str = ""
    is_made_at_once: bool = False
    copy_of: str = ""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.tensor_bytes + self.graph_bytes + self.host_bytes

    @property
    def has_grown(self) -> bool:
        """Whether it has got items since it was first seen, and not one for the other."""
        before = self.num_items_before or 0
        return not self.is_made_at_once and self.num_items - before >= 3 and self.num_items > 1.5 * before


@dataclass(frozen=True)
class Seen:
    """One process at the moment its memory ran out.

    Attributes:
        kept: what the user's variables keep, largest first.
        is_evaluating: whether every model that has parameters is in evaluation mode.
        records_graph: whether autograd was recording.
        evaluation_place: the line that called the model, where that is so.
        processes: this process first, then those it started.
        is_of_worker: whether the error is that of a worker of a DataLoader.
        loader: the variable of the user's that has the loader, with the line that made it.
        num_workers: that this loader starts.
        lines: the limits on this process, with what is used of each.
        machine_bytes: the memory that the machine has.
    """

    kept: tuple[Kept, ...] = ()
    is_evaluating: bool = False
    records_graph: bool = False
    evaluation_place: str = ""
    processes: tuple[ProcessUse, ...] = ()
    is_of_worker: bool = False
    loader: Kept | None = None
    num_workers: int = 0
    lines: tuple[Line, ...] = ()
    machine_bytes: int | None = None
