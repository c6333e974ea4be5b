"""`plimsoll plan`: its options, the files it writes, and its exit codes.

The plans are made by hand. Tests of planning cover the search for a plan.
"""

import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from placement_records import impossible_plan as placement_impossible
from placement_records import streamed_plan
from plan_records import MIB, fitting_plan, impossible_plan
from plimsoll.errors import DeviceError
from plimsoll.records.comparison import Calibration
from plimsoll.records.placement import InferencePlan
from plimsoll.records.plan import Pin, Plan
from strategy_records import none_fits, strategies


@pytest.fixture
def planning(standing_in):
    """Return ``planning(plan or error)``, which replaces `plan_job` and returns the list of its arguments."""
    return partial(standing_in, "plimsoll.planning.plan", "plan_job")


@pytest.mark.parametrize(
    ("plan", "code", "words"),
    [
        (fitting_plan(), 0, "Fits: 1000.0 MiB of 2.0 GiB"),
        (impossible_plan(), 1, "Impossible: at least 2.4 GiB is needed"),
    ],
)
def test_the_exit_code_says_whether_there_is_a_plan(call, job, planning, plan, code, words):
    planning(plan)
    done = call("plan", job)
    assert (done.code, done.err) == (code, "")
    assert words in done.out


def test_without_options_the_job_is_planned_as_it_is(call, job, planning):
    asked = planning(fitting_plan())
    call("plan", job)
    assert asked == [
        {
            "batch_size": 16,
            "precision": "fp32",
            "device": None,
            "limit_bytes": None,
            "pins": (),
            "forbids": (),
            "calibration": Calibration(),
            "started": None,
        }
    ]


def test_fine_tuning_strategies_are_compared(call, job, standing_in):
    asked = standing_in("plimsoll.planning.strategies", "compare_strategies", strategies())
    done = call("plan", job, "--budget", "8GiB", "--compare")
    assert (done.code, done.err) == (0, "")
    assert "weights streamed" in done.out
    assert asked[0]["limit_bytes"] == 8 << 30
    standing_in("plimsoll.planning.strategies", "compare_strategies", none_fits())
    assert call("plan", job, "--compare").code == 1


def test_each_strategy_is_printed_on_standard_error_when_it_is_planned_but_not_with_json(call, job, monkeypatch):
    def compare(job, *, on_strategy, **options):
        found = strategies()
        for strategy in found.strategies:
            on_strategy(strategy)
        return found

    module = ModuleType("plimsoll.planning.strategies")
    module.compare_strategies = compare
    monkeypatch.setitem(sys.modules, "plimsoll.planning.strategies", module)
    told = call("plan", job, "--compare").err.splitlines()
    assert told[1:] == ["full, weights streamed: fits, 1.5 GiB, 12.0 s per step", "LoRA: impossible"]
    assert call("plan", job, "--compare", "--json").err == ""


def test_a_comparison_has_pins_of_its_own(call, job):
    done = call("plan", job, "--compare", "--pin", "heap=never", "--forbid", "lora")
    assert done.code == 2
    assert "--compare sets the pins of each strategy, and cannot use heap=never, lora: leave one" in done.err


def test_every_option_arrives(call, job, planning, tmp_path):
    asked = planning(fitting_plan())
    Calibration().save(tmp_path / "calibration.json")
    options = ["--device", "rtx3060", "--budget", "8GiB", "--set", "batch_size=64", "--set", "precision=auto"]
    options += [
        "--pin",
        "checkpointing=all",
        "--pin",
        "micro_batch=4",
        "--forbid",
        "activation_offload",
        "--forbid",
        "lora",
    ]
    call("plan", job, *options, "--calibration", tmp_path / "calibration.json")
    assert asked == [
        {
            "batch_size": 64,
            "precision": "auto",
            "device": "rtx3060",
            "limit_bytes": 8192 * MIB,
            "pins": (Pin(technique="checkpointing", value="all"), Pin(technique="micro_batch", value=4)),
            "forbids": ("activation_offload", "lora"),
            "calibration": Calibration(),
            "started": None,
        }
    ]


@pytest.mark.parametrize("plan", [fitting_plan(), impossible_plan()])
def test_json_is_the_record_and_nothing_else(call, job, planning, plan):
    planning(plan)
    done = call("plan", job, "--json")
    (line,) = done.out.splitlines()
    assert (done.code, done.err) == (0 if plan.fits else 1, "")
    assert Plan.from_json(line) == plan


def test_a_page_is_written_its_path_printed_and_the_headline_told_to_people(call, job, planning, tmp_path):
    planning(impossible_plan())
    page = tmp_path / "a.html"
    done = call("plan", job, "-o", page)
    assert (done.code, done.out) == (1, f"{page}\n")
    assert done.err.startswith("Impossible: at least 2.4 GiB is needed")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_plan_is_written_that_report_shows(call, job, planning, tmp_path):
    planning(fitting_plan())
    record = tmp_path / "plan.json"
    printed = call("plan", job, "-o", record, "--json").out
    assert record.read_text(encoding="utf-8") == printed
    assert Plan.load(record) == fitting_plan()
    assert call("report", record).out == call("plan", job).out
    assert call("report", record, "-o", tmp_path / "plan.html").code == 0


REFUSED = {
    "plan-pin-unreadable": ["--pin", "micro batch=4"],
    "plan-pinned-twice": ["--pin", "micro_batch=4", "--pin", "micro_batch=8"],
    "plan-pinned-and-forbidden": ["--pin", "checkpointing=all", "--forbid", "checkpointing"],
    "plan-budget": ["--budget", "much"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_is_refused_before_the_work(refused, job, planning, golden, name):
    asked = planning(fitting_plan())
    golden(f"errors/{name}.txt", refused("plan", job, *REFUSED[name]))
    assert asked == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "batchsize=3"], "batch_size"),
        (["-o", "a.pdf"], "cannot write a.pdf: its suffix is not .html or .json: give -o a name with one of them"),
        (["--calibration", "none.json"], "there is no 'calibration' record at none.json: check the path"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_work(call, job, planning, options, message):
    asked = planning(fitting_plan())
    done = call("plan", job, *options)
    assert (done.code, done.out, asked) == (2, "", [])
    assert done.err.startswith("error: ")
    assert message in done.err


def test_json_says_what_went_wrong(failed_as_json, job, planning):
    message = "no device is called rtx1: use --device rtx3060"
    planning(DeviceError(message))
    assert failed_as_json("plan", job) == {"error": "DeviceError", "message": message, "exit_code": 2}


def test_ctrl_c_is_said_in_a_line(failed_as_json, job, planning):
    planning(KeyboardInterrupt())
    message = "planning was stopped before it had a result: run the same command again"
    assert failed_as_json("plan", job) == {"error": "Interrupted", "message": message, "exit_code": 130}


@pytest.fixture
def placing(monkeypatch):
    """Return ``placing(plan)``, which replaces `plan_inference` and returns the list of its arguments."""

    def become(plan):
        asked = []

        def function(folder, task, *, progress, **options):
            asked.append({"folder": folder, "task": task, **options})
            progress("tracing")
            return plan

        module = ModuleType("plimsoll.planning.plan_inference")
        module.plan_inference = function
        monkeypatch.setitem(sys.modules, "plimsoll.planning.plan_inference", module)
        return asked

    return become


@pytest.fixture
def folder(tmp_path):
    """Create a model folder whose configuration names a language model."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    return path


@pytest.mark.parametrize(
    ("plan", "code", "words"),
    [(streamed_plan(), 0, "Fits: 900.0 MiB of 1000.0 MiB"), (placement_impossible(), 1, "give --budget 516MiB")],
)
def test_a_model_is_placed_and_the_exit_code_says_whether_it_fits(call, folder, placing, plan, code, words):
    placing(plan)
    done = call("plan", folder, "--inference")
    assert (done.code, done.err) == (code, "")
    assert words in done.out


def test_what_is_asked_of_a_model_arrives(call, folder, placing):
    asked = placing(streamed_plan())
    call("plan", folder, "--inference")
    options = ["--task", "generate", "--max-length", "64", "--max-new-tokens", "8", "--dtype", "bf16"]
    call("plan", folder, "--inference", *options, "--budget", "1GiB", "--device", "rtx3060")
    usual = {"longest_tokens": 256, "new_tokens": 0, "limit_bytes": None, "device": None, "dtype": None}
    told = {
        "longest_tokens": 64, "new_tokens": 8, "limit_bytes": 1024 * MIB, "device": "rtx3060", "dtype": torch.bfloat16
    }  # fmt: skip
    assert asked == [{"folder": folder, "task": "score"} | usual, {"folder": folder, "task": "generate"} | told]


@pytest.mark.parametrize("word", ["stored", "fp32", "bf16", "fp16"])
def test_types_are_called_as_apply_calls_them(call, folder, placing, word):
    asked = placing(streamed_plan())
    assert call("plan", folder, "--inference", "--dtype", word).code == 0
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert asked[0]["dtype"] is types.get(word)


def test_a_placement_goes_to_a_file_or_as_one_record(call, folder, placing, tmp_path):
    placing(streamed_plan())
    done = call("plan", folder, "--inference", "-o", tmp_path / "plan.json", "--json")
    assert InferencePlan.load(tmp_path / "plan.json") == InferencePlan.from_json(done.out) == streamed_plan()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--inference", "--train"], "--train and --inference cannot be combined"),
        (["--inference", "--pin", "heap"], "--pin belongs to a plan with --train: leave it out, or give --train"),
        (["--task", "score"], "--task belongs to a plan with --inference"),
        (["--inference", "--dtype", "int3"], "--dtype int3 is not supported for weights: give one of stored"),
    ],
)
def test_options_of_the_other_plan_are_refused(refused, folder, placing, options, words):
    placing(streamed_plan())
    assert words in refused("plan", folder, *options)


def test_what_is_no_model_is_refused(refused, job, tmp_path):
    assert "there is no model folder" in refused("plan", tmp_path / "nowhere", "--inference")
    assert "trains new weights ('lstm'), which inference cannot use yet: " in refused("plan", job, "--inference")
