"""Traces in which what repeats was noted again, and those of running all of it."""

from itertools import groupby
from operator import itemgetter

from plimsoll.planning.dry_run import step


def all_run(monkeypatch, trace):
    """Trace without noting anything again."""
    with monkeypatch.context() as patch:
        patch.setattr(step, "passes_repeat", lambda workload, choices: False)
        return trace()


def settled(trace):
    """The trace with deaths inside one op in order: autocast on the CPU frees in the order of addresses."""
    events = []
    for _, of_op in groupby(zip(trace.event_op, trace.events, strict=True), key=itemgetter(0)):
        for is_birth, run in groupby((event for _, event in of_op), key=lambda event: event > 0):
            events += run if is_birth else sorted(run)
    return trace.model_copy(update={"events": tuple(events)})


def written_out(trace):
    """The settled trace with texts in place of their numbers, which are in the order in which they were met."""

    def texts_of(table, *columns):
        found = {name: tuple(trace.texts[number] for number in getattr(table, name)) for name in columns}
        return table.model_copy(update=found)

    changes = {
        "ops": texts_of(trace.ops, "name", "module", "line", "dtype"),
        "storages": texts_of(trace.storages, "shape", "name"),
        "texts": (),  # some are of modules that have no op of their own
    }
    return settled(trace).model_copy(update=changes)
