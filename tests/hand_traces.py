"""Handwritten traces, small enough for mental arithmetic."""

from __future__ import annotations

from plimsoll.records.trace import Assumption, OpTable, StorageTable, Trace

MIB = 1 << 20


WORK = ("flops", "moved_bytes", "outside_bytes")


def trace_of(
    *ops: tuple[str, int, str], assumptions: tuple[Assumption, ...] = (), work: dict[int, dict[str, int]] | None = None
) -> Trace:
    """Make a trace of ops ``(phase, step, events)``.

    Events are a list of births, ``+name category bytes``, and deaths, ``-name``; a name that ends in ``@host`` is in
    host memory. Op number ``i`` is called ``aten.op<i>.default``, in module ``layer<i>`` and at line ``train.py:<i>``.
    The shape of a storage is its name without a final mark ``'``; objects held by a model or an optimizer have their
    names. ``work`` maps the number of an op to its entries of `WORK`, in float32.
    """
    texts = {"": 0}
    rows: list[tuple[int, ...]] = []
    storages: dict[str, list] = {}
    row_of: dict[str, int] = {}
    events, event_op = [], []

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    for number, (phase, step, script) in enumerate(ops):
        where = (text(f"aten.op{number}.default"), text(f"layer{number}"), text(f"train.py:{number}"))
        done = (work or {}).get(number, {})
        counted = (done.get(name, 0) for name in WORK)
        rows.append((*where, phase, step, False, *counted, text("float32" if done else "")))
        words = script.replace("optimizer states", "optimizer_states").split()[::-1]
        while words:
            word = words.pop()
            sign, name = word[0], word[1:]
            if sign == "+":
                category, num_bytes = words.pop().replace("_", " "), int(words.pop())
                row_of[name] = len(storages)
                called = text(name if category in ("parameters", "gradients", "optimizer states") else "")
                storages[name] = [
                    num_bytes,
                    category,
                    number,
                    -1,
                    text(name.rstrip("'")),
                    called,
                    name.endswith("@host"),
                ]
            else:
                storages[name][3] = number
            events.append((1 + row_of[name]) * (1 if sign == "+" else -1))
            event_op.append(number)
    names = ("name", "module", "line", "phase", "step", "by_autograd", *WORK, "dtype")
    columns = ("num_bytes", "category", "born", "died", "shape", "name", "on_host")
    return Trace(
        source="predicted",
        lowered_to="by hand",
        texts=tuple(texts),
        ops=OpTable(**dict(zip(names, map(tuple, zip(*rows, strict=True)), strict=True))) if rows else _NO_OPS,
        storages=StorageTable(**dict(zip(columns, zip(*storages.values(), strict=True), strict=True)))
        if storages
        else _NO_STORAGES,
        events=tuple(events),
        event_op=tuple(event_op),
        assumptions=assumptions,
    )


_NO_OPS = OpTable(**dict.fromkeys(OpTable.model_fields, ()))
_NO_STORAGES = StorageTable(num_bytes=(), category=(), born=(), died=(), shape=(), name=(), on_host=())
