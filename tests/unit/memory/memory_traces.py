"""Traces for the tests of this folder, written by hand or recorded from a few ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from plimsoll.memory.recorder import Recorder
from plimsoll.records.trace import Category, OpTable, Phase, StorageTable, Trace


class Storage(NamedTuple):
    """One storage: its bytes, the ops of its birth and death (rows; -1: never dies), and its purpose."""

    num_bytes: int
    born: int
    died: int = -1
    category: Category = "activations"
    shape: str = "float32[1]"
    on_host: bool = False


def trace_of(ops: list[str], storages: list[Storage], phase: Phase = "forward", module: str = "layer") -> Trace:
    """Return a trace of one step, in which the births of an op come before its deaths."""
    texts = {"": 0, module: 1}
    names = tuple(texts.setdefault(op, len(texts)) for op in ops)
    shapes = tuple(texts.setdefault(storage.shape, len(texts)) for storage in storages)
    born = [(storage.born, 0, number + 1) for number, storage in enumerate(storages)]
    died = [(storage.died, 1, -number - 1) for number, storage in enumerate(storages) if storage.died >= 0]
    events = sorted(born + died)
    return Trace(
        source="measured",
        lowered_to="cpu",
        texts=tuple(texts),
        ops=OpTable(
            name=names,
            module=(1,) * len(ops),
            line=(0,) * len(ops),
            phase=(phase,) * len(ops),
            step=(1,) * len(ops),
            by_autograd=(False,) * len(ops),
            **dict.fromkeys(("flops", "moved_bytes", "outside_bytes", "dtype"), (0,) * len(ops)),
        ),
        storages=StorageTable(
            num_bytes=tuple(storage.num_bytes for storage in storages),
            category=tuple(storage.category for storage in storages),
            born=tuple(storage.born for storage in storages),
            died=tuple(storage.died for storage in storages),
            shape=shapes,
            name=(0,) * len(storages),
            on_host=tuple(storage.on_host for storage in storages),
        ),
        events=tuple(signed for _, _, signed in events),
        event_op=tuple(op for op, _, _ in events),
    )


class Row(NamedTuple):
    """One storage of a recorded trace, with names."""

    shape: str
    category: Category
    born_at: str
    died_at: str
    module: str
    phase: Phase


class Recorded:
    """The record of a block, complete once the block has ended."""

    trace: Trace

    def rows(self) -> list[Row]:
        """Return the storages in the order of their birth."""
        trace, texts = self.trace, self.trace.texts
        names = [texts[name].removeprefix("aten.").partition(".")[0] for name in trace.ops.name]
        table = trace.storages
        return [
            Row(
                texts[shape], category, names[born], names[died] if died >= 0 else "", texts[trace.ops.module[born]],
                trace.ops.phase[born],
            )
            for shape, category, born, died in zip(table.shape, table.category, table.born, table.died, strict=True)
        ]  # fmt: skip

    def of(self, category: Category) -> list[str]:
        """Return the shapes of the storages of one category."""
        return [row.shape for row in self.rows() if row.category == category]


@contextmanager
def recorded(prepare: Callable[[Recorder], None] = lambda recorder: None) -> Iterator[Recorded]:
    """Record the ops of the block on real tensors, as the first step."""
    found, recorder = Recorded(), Recorder()
    recorder.step, recorder.counts_steps = 1, True
    with recorder:
        prepare(recorder)
        yield found
    found.trace = recorder.trace("measured", "cpu")
