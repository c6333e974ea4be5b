"""`fully_shard` in the contract of techniques, which `test_contract_techniques` cannot test in one process.

One group of 2 ranks runs all cases. The model is restored, and losses, gradients and weights equal one process.
Memory that runs out in any phase on one rank loses nothing. The same holds with every compatible technique.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.ranks_started import run_cases

from plimsoll.records.run import PHASES_OF_A_STEP
from plimsoll.techniques import TECHNIQUES
from technique_trainings import available_choices

PHASES = tuple(phase for phase in PHASES_OF_A_STEP if phase != "fetch")
TWICE = {"gathered": "twice"}
WAYS: tuple[dict[str, str], ...] = ({"gathered": "once"}, TWICE, TWICE | {"offload": "disk"})


def of(*choices: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"technique": name, "options": options} for name, options in choices]


def alone(training: str) -> list[dict[str, Any]]:
    return [{"training": training, "choices": of(("fully_shard", way))} for way in WAYS]


def with_others(training: str) -> list[dict[str, Any]]:
    """Return cases with shards and the strongest choice of each technique that is available for this training."""
    cases = []
    for name in sorted(one.name for one in TECHNIQUES.values() if one.works_on_shards):
        available = available_choices(name, training)
        if isinstance(available, str):
            continue
        options = dict(available[-1].options) if name != "micro_batch" else {"samples": 2}
        way = TWICE if name == "optimizer_offload" else WAYS[-1]
        if name == "autocast":
            way = way | {"dtype": str(options["dtype"])}
        cases.append({"training": training, "choices": of(("fully_shard", way), (name, options))})
    return cases


def out_of_memory(training: str, ways: tuple[dict[str, str], ...]) -> list[dict[str, Any]]:
    return [
        {"training": training, "choices": of(("fully_shard", way)), "phase": phase, "rank": number % 2}
        for number, phase in enumerate(PHASES)
        for way in ways
    ]


def check(folder: Any, cases: list[dict[str, Any]]) -> None:
    of_ranks = run_cases(folder, 2, cases, seconds=60 + 20 * len(cases), program="shards_contract_program")
    for case, *found in zip(cases, *of_ranks, strict=True):
        assert found[0] == found[1] or case["phase"] == "optimizer", case  # updates are repeated in part
        if "phase" in case:
            assert {phase for events in found for phase, _ in events} <= {case["phase"]}, case
            assert found[case["rank"]], case
        else:
            assert found == [[], []], case


@pytest.mark.long
def test_shards_keep_the_contract_alone_and_with_every_technique_that_may_go_with_them(tmp_path):
    check(tmp_path, [*alone("gpt2"), *with_others("gpt2"), *out_of_memory("gpt2", WAYS[-1:])])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("training", ["bert", "t5"])
def test_shards_keep_the_contract_with_other_models(tmp_path, training):
    check(tmp_path, [*alone(training), *with_others(training), *out_of_memory(training, WAYS)])
