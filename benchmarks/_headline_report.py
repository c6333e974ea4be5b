"""The tables of the headline experiment."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from _headline_tasks import Task

SHARES = (1.0, 0.5, 0.25)
FACTOR = 1.05  # ratio between two limits that are tried
WANTED_LIMIT, WANTED_TIME = 0.5, 0.9
OURS = "plimsoll"
Found = dict[str, Any]


def seconds_of(found: Found, tool: str, share: float) -> list[float]:
    """Return the seconds of all timed steps except the first of each round, which has no optimizer states yet."""
    keys = [json.loads(key) for key in found["times"]]
    rounds = [found["times"][json.dumps(key)] for key in keys if key[:2] == [tool, share]]
    return [second for one in rounds if one["trains"] for second in one["seconds"][1:]]


def best_rival(found: Found) -> Found:
    """Return the other tool with the smallest limit, and for each share the one with the fastest step, next to ours."""
    limits = found["limits"]
    rivals = {name: limits[name]["limit_mib"] for name in limits if name != OURS}
    least = min(rivals, key=lambda name: rivals[name])
    best: Found = {
        "need_mib": limits["plain"]["limit_mib"], "least": least, "least_mib": rivals[least],
        "our_mib": limits[OURS]["limit_mib"], "limit_ratio": limits[OURS]["limit_mib"] / rivals[least], "times": {},
    }  # fmt: skip
    for share in SHARES:
        medians = {name: statistics.median(seconds) for name in rivals if (seconds := seconds_of(found, name, share))}
        ours = seconds_of(found, OURS, share)
        fastest = min(medians, key=lambda name: medians[name]) if medians else None
        best["times"][str(share)] = {
            "fastest": fastest, "seconds": medians[fastest] if fastest else None,
            "our_seconds": statistics.median(ours) if ours else None,
            "ratio": statistics.median(ours) / medians[fastest] if ours and fastest else None,
        }  # fmt: skip
    return best


def tables(measured: Mapping[Task, Found], titles: Mapping[str, str]) -> str:
    """Return one table per model."""
    lines: list[str] = []
    for task, found in measured.items():
        lines += [f"## {task.title}, {task.batch_size} x {task.length} tokens a step", "", *table(found, titles), ""]
    return "\n".join(lines)


def summary(measured: Mapping[Task, Found], titles: Mapping[str, str]) -> str:
    """Return one line per model: the smallest limits, and step times within all and half of the plain loop's memory."""
    lines = [
        "| model, batch x tokens | plain loop | best other tool | Plimsoll | Plimsoll / best other "
        "| Plimsoll's step time at the plain loop's limit | at half that limit |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for task, found in measured.items():
        best = best_rival(found)
        lines.append(
            f"| {task.title}, {task.batch_size} x {task.length} | {best['need_mib']:,} MiB | {best['least_mib']:,} MiB "
            f"({titles[best['least']]}) | {best['our_mib']:,} MiB | {best['limit_ratio']:.2f} | "
            f"{_compared(found, best, titles, 1.0)} | {_compared(found, best, titles, 0.5)} |"
        )
    return "\n".join(lines)


def _compared(found: Found, best: Found, titles: Mapping[str, str], share: float) -> str:
    times = best["times"][str(share)]
    rounds = [one for key, one in found["times"].items() if json.loads(key)[:2] == [OURS, share]]
    if sum(one.get("oom_events", 0) for one in rounds):
        last = statistics.median(one["seconds"][-1] for one in rounds)
        return f"{_ratio(times, titles)}; memory ran out on the way, and the last step took {last:.1f} s"
    return _ratio(times, titles) or time_of(found, OURS, share)


def _ratio(times: Found, titles: Mapping[str, str]) -> str:
    if times["ratio"] is not None:
        return (
            f"{times['our_seconds']:.1f} s, {times['ratio']:.2f} times the fastest tool's ({titles[times['fastest']]})"
        )
    if times["our_seconds"] is not None:
        return f"{times['our_seconds']:.1f} s; no other tool trains"
    return ""


def table(found: Found, titles: Mapping[str, str]) -> list[str]:
    """Return one line per tool."""
    need_mib = found["limits"]["plain"]["limit_mib"]
    shares = " | ".join(f"s in {share:.2f} x" for share in SHARES)
    lines = [
        f"| tool | smallest limit MiB | of the plain loop's | peak MiB | differs by | {shares} |",
        "| --- | --: | --: | --: | --: " + "| --: " * len(SHARES) + "|",
    ]
    for name, limit in sorted(found["limits"].items(), key=lambda item: -item[1]["limit_mib"]):
        times = " | ".join(time_of(found, name, share) for share in SHARES)
        lines.append(
            f"| {titles[name]} | {limit['limit_mib']:,} | {limit['limit_mib'] / need_mib:.2f} | "
            f"{limit['peak_mib']:,.0f} | {limit['difference']:.0e} | {times} |"
        )
    ours = found["limits"][OURS]
    files = f"{ours['in_files_mib']:,.0f} MiB in files"
    lines += ["", f"Plimsoll's smallest limit: {ours['choices']}; {files}; {ours['oom_events']} times out of memory."]
    lines += [f"Settings of the fastest: {settings(found, titles)}."] if found["times"] else []
    best = best_rival(found)
    half = best["times"]["0.5"]["ratio"]
    said = [verdict("smallest limit", best["limit_ratio"], WANTED_LIMIT, f"of {titles[best['least']]}'s")]
    if half is not None:
        said.append(verdict("step in half", half, WANTED_TIME, f"of {titles[best['times']['0.5']['fastest']]}'s"))
    return [*lines, "", " ".join(said)]


def verdict(what: str, ratio: float, wanted: float, of: str) -> str:
    """Return a sentence on whether a goal is reached."""
    return f"{what.capitalize()}: {ratio:.2f} {of}; the goal of {wanted} is {'' if ratio <= wanted else 'not '}reached."


def time_of(found: Found, name: str, share: float) -> str:
    """Return the median and range of the step times, or the reason why the step was not timed."""
    seconds = seconds_of(found, name, share)
    if seconds:
        return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
    was_tried = any(json.loads(key)[:2] == [name, share] for key in found["times"])
    fits = found["limits"][name]["limit_mib"] <= share * found["limits"]["plain"]["limit_mib"] * FACTOR
    return "failed" if was_tried else "not timed" if fits else "does not fit"


def settings(found: Found, titles: Mapping[str, str]) -> str:
    """List the settings that each tool used for each share, in the last round."""
    used = {}
    for key, one in found["times"].items():
        name, share, _ = json.loads(key)
        if one["trains"]:
            chosen = one.get("setting")
            how = one.get("choices") or "whole batch"
            if chosen:
                how = f"{chosen['micro_batch']} samples{' with checkpointing' * chosen['checkpointing']}"
            if one.get("oom_events"):
                how += f", out of memory {one['oom_events']} times, after which a smaller fallback went on"
            used[name, share] = f"{titles[name]} in {share:.2f} x: {how}"
    return "; ".join(used.values())
