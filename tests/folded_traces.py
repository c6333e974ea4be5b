"""Traces in which repeated work was recorded again instead of run, and traces of running all of it."""

from itertools import groupby
from operator import itemgetter

from plimsoll.planning.dry_run import step


def all_run(monkeypatch, trace):
    """Trace without reusing records of repeated passes."""
    with monkeypatch.context() as patch:
        patch.setattr(step, "passes_repeat", lambda workload, choices: False)
        return trace()


def settled(trace):
    """Return the trace with deaths inside one op sorted: autocast on the CPU frees in the order of addresses."""
    events = []
    for _, of_op in groupby(zip(trace.event_op, trace.events, strict=True), key=itemgetter(0)):
        for is_birth, run in groupby((event for _, event in of_op), key=lambda event: event > 0):
            events += run if is_birth else sorted(run)
    return trace.model_copy(update={"events": tuple(events)})


def written_out(trace):
    """Return the settled trace with texts in place of their numbers, which depend on the order of first use."""

    def texts_of(table, *columns):
        found = {name: tuple(trace.texts[number] for number in getattr(table, name)) for name in columns}
        return table.model_copy(update=found)

    changes = {
        "ops": texts_of(trace.ops, "name", "module", "line", "dtype"),
        "storages": texts_of(trace.storages, "shape", "name"),
        "texts": (),  # some are of modules without ops
    }
    return settled(trace).model_copy(update=changes)
