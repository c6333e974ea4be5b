"""The headline experiment's results for figures computed by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _headline_report as report
import headline
from _headline_tasks import Task

TITLES = {"plain": "plain loop", "trainer": "Trainer", "lightning": "Lightning", "plimsoll": "Plimsoll"}


TASK = Task("gpt2", "GPT-2", 8, 128, job={})


def limit(mib: int) -> report.Found:
    outcome = {"limit_mib": mib, "peak_mib": mib - 10, "difference": 1e-5}
    return {**outcome, "choices": "micro_batch=1", "in_files_mib": 1500, "oom_events": 0}


def timed(seconds: list[float], trains: bool = True) -> report.Found:
    return {"trains": trains, "seconds": seconds, "setting": {"micro_batch": 2, "checkpointing": True}}


def found() -> report.Found:
    times = {
        ("plain", 1.0, 0): timed([9.0, 2.0, 3.0, 4.0]),
        ("trainer", 0.5, 0): timed([9.0, 5.0, 5.0, 5.0]),
        ("trainer", 0.5, 1): timed([9.0, 7.0, 7.0, 7.0]),
        ("lightning", 0.5, 0): timed([1.0, 1.0, 1.0, 1.0], trains=False),
        ("plimsoll", 0.5, 0): timed([9.0, 3.0, 3.0, 3.0]),
    }
    limits = {"plain": limit(1000), "trainer": limit(500), "lightning": limit(600), "plimsoll": limit(200)}
    return {"limits": limits, "times": {json.dumps(key): one for key, one in times.items()}}


def test_the_best_rival_trains_and_first_steps_do_not_count():
    best = report.best_rival(found())
    assert (best["least"], best["least_mib"], best["our_mib"], best["limit_ratio"]) == ("trainer", 500, 200, 0.4)
    assert best["times"]["0.5"] == {"fastest": "trainer", "seconds": 6.0, "our_seconds": 3.0, "ratio": 0.5}
    assert best["times"]["1.0"] == {"fastest": "plain", "seconds": 3.0, "our_seconds": None, "ratio": None}
    assert best["times"]["0.25"]["fastest"] is None


def test_the_tables_say_what_was_reached():
    text = report.tables({TASK: found()}, TITLES)
    assert "| Trainer | 500 | 0.50 | 490 | 1e-05 | not timed | 6.0 (5.0 to 7.0) | does not fit |" in text
    assert "Smallest limit: 0.40 of Trainer's; the goal of 0.5 is reached." in text
    assert "Step in half: 0.50 of Trainer's; the goal of 0.9 is reached." in text
    assert report.summary({TASK: found()}, TITLES).splitlines()[-1] == (
        "| GPT-2, 8 x 128 | 1,000 MiB | 500 MiB (Trainer) | 200 MiB | 0.40 | not timed "
        "| 3.0 s, 0.50 times the fastest tool's (Trainer) |"
    )
    worse = found()
    worse["limits"]["plimsoll"] = limit(300)
    assert "Smallest limit: 0.60 of Trainer's; the goal of 0.5 is not reached." in report.tables({TASK: worse}, TITLES)


class Searched(headline.Experiment):
    """An experiment whose tool needs a fixed number of MiB for two steps, and more for five."""

    def __init__(self, needs_mib: int, more_mib: int = 0) -> None:
        self.needs_mib, self.more_mib, self.tried = needs_mib, more_mib, []
        self.task = TASK
        self.found = {"limits": {"plain": {"limit_mib": 1000}}}

    def measured(self, tool, setting, limit_mib, steps, number=0):
        self.tried.append(limit_mib)
        return {"trains": limit_mib >= self.needs_mib + self.more_mib * (steps == headline.STEPS), "said": "why"}


@pytest.mark.parametrize(("tool", "guess_mib"), [("trainer", 500), ("trainer", 900), ("accelerate", 500)])
def test_the_limit_that_is_found_is_the_smallest_but_for_five_percent(tool, guess_mib):
    found_mib = Searched(700).smallest(tool, None, guess_mib)["limit_mib"]
    assert 700 <= found_mib <= 700 * headline.FACTOR + 2


def test_a_limit_that_does_for_two_steps_and_not_for_five_is_raised():
    assert Searched(700, more_mib=100).smallest("trainer", None, 700)["limit_mib"] >= 800


def test_a_tool_that_frees_nothing_is_searched_from_above():
    experiment = Searched(990)
    assert experiment.smallest("accelerate", None, 100)["limit_mib"] == 1000
    assert experiment.tried[:2] == [100, 1000]


def test_a_tool_that_trains_in_no_limit_is_not_searched_for_ever():
    with pytest.raises(RuntimeError, match=r"torchtune does not train GPT-2 in 3,.* MiB: why"):
        Searched(10**9).smallest("torchtune", None, 500)


class Timed(Searched):
    """An experiment in which a step takes a tenth of a second for each sample of a micro-batch."""

    def measured(self, tool, setting, limit_mib, steps, number=0):
        self.tried.append((tool, setting, number))
        if setting is None:
            return {"trains": True, "seconds": [9.0, 0.2, 0.2]}
        trains = setting.checkpointing or setting.micro_batch < 8
        return {"trains": trains, "seconds": [9.0, setting.micro_batch / 10, setting.micro_batch / 10]}


def test_the_fastest_setting_that_trains_is_timed_again(tmp_path):
    experiment = Timed(0)
    experiment.file = tmp_path / "measured.json"
    limits = {"plain": {"limit_mib": 1000}, "by_hand": {"limit_mib": 600}, "plimsoll": {"limit_mib": 400}}
    experiment.found = {"limits": limits, "times": {}}
    experiment.times(2)
    times = {tuple(json.loads(key)): one for key, one in experiment.found["times"].items()}
    assert set(times) == {
        (name, share, number)
        for name, share in [("plain", 1.0), ("by_hand", 1.0), ("plimsoll", 1.0), ("plimsoll", 0.5)]
        for number in (0, 1)
    }
    assert not times["plain", 1.0, 0]["trains"]
    assert times["by_hand", 1.0, 0]["setting"] == {"micro_batch": 1, "checkpointing": False}
    again = [setting for tool, setting, number in experiment.tried if (tool, number) == ("by_hand", 1)]
    assert again == [headline.Setting(1)]


def test_weights_that_went_another_way_are_not_exact(tmp_path):
    experiment = Searched(0)
    experiment.folder = tmp_path
    torch.save({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}, tmp_path / "moved-5.pt")
    near = {"moved": {"a": torch.tensor([3.0, 0.003]), "b": torch.tensor([4.0])}}
    experiment._compare(near, 5)
    assert near["difference"] == pytest.approx(0.0006)
    assert near["exact"]
    less_near = {"moved": {"a": torch.tensor([3.0, 0.01]), "b": torch.tensor([4.0])}}
    experiment._compare(less_near, 5)
    assert not less_near["exact"]  # relative distance 0.002
    far = {"moved": {"a": torch.tensor([0.0, 3.0]), "b": torch.tensor([4.0])}}
    experiment._compare(far, 5)
    assert far["difference"] == pytest.approx(18**0.5 / 5)
    assert not far["exact"]
