"""Workers of a DataLoader, each with memory of its own: copies of the data, and batches that wait to be used.

Reported for a live process if memory ran out in a worker. Also reported if the child processes of a process hold at
least a fifth of the private memory of the process and its children. A page that a fork still shares with its parent
counts in each process, as in the kernel's numbers.
"""

from __future__ import annotations

from plimsoll.diagnose.evidence import Evidence, Seen
from plimsoll.records.diagnosis import Fact, Finding
from plimsoll.records.units import format_bytes

_LEAST_SHARE = 0.2
_REMEDY = (
    "start fewer workers (`num_workers=`), and keep the data in arrays or memory-mapped files: lists and dicts are "
    "copied page by page as each worker touches them"
)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find memory that each worker holds separately."""
    seen = evidence.seen
    if seen is None or evidence.kind != "cpu":
        return ()
    own_bytes, workers_bytes = _sums(seen)
    is_much = workers_bytes > 0 and workers_bytes >= _LEAST_SHARE * (own_bytes + workers_bytes)
    if not seen.is_of_worker and not (is_much and seen.num_workers):
        return ()
    loader = seen.loader
    where = f" of `{loader.name}`" if loader is not None else ""
    number = seen.num_workers or max(0, len(seen.processes) - 1)
    return (
        Finding(
            cause="workers",
            title=f"{number} worker{'s' * (number != 1)}{where} hold memory of their own",
            place=loader.place
            if loader is not None and loader.place
            else evidence.event.place
            if evidence.event
            else "",
            evidence=tuple(_facts(seen)),
            remedy=_REMEDY,
            code="num_workers=0" if number == 1 else f"num_workers={number // 2}" if number else "",
            effect_bytes=workers_bytes or None,
            effect_known="measured" if workers_bytes else None,
        ),
    )


def _sums(seen: Seen) -> tuple[int, int]:
    private = [one.private_bytes for one in seen.processes]
    return sum(private[:1]), sum(private[1:])


def _facts(seen: Seen) -> list[Fact]:
    facts = [Fact(text="the error comes from a worker", known="measured")] if seen.is_of_worker else []
    for one in seen.processes[1:]:
        text = f"process {one.pid} ({one.name}) holds {format_bytes(one.private_bytes)} of private memory"
        facts.append(Fact(text=text, known="measured"))
    if seen.processes:
        facts.append(Fact(text=f"this process holds {format_bytes(seen.processes[0].private_bytes)}", known="measured"))
    return facts
