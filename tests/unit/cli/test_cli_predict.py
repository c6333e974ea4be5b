"""`plimsoll predict`: its options, the files it writes, and its exit codes.

The predictions are made by hand. Tests of planning cover the computation of a prediction.
"""

from functools import partial

import pytest

from plimsoll.errors import DeviceError
from plimsoll.records.prediction import Prediction
from prediction_records import MIB, fitting, moment, on_cpu, too_large


@pytest.fixture
def predicting(standing_in):
    """Return ``predicting(prediction or error)``, which replaces `predict_job` and returns its arguments."""
    return partial(standing_in, "plimsoll.planning.predict_job", "predict_job")


@pytest.mark.parametrize(
    ("prediction", "code", "words"),
    [
        (fitting(), 0, "Fits: 1000.0 MiB of 2.0 GiB"),
        (on_cpu(), 0, "Probably fits: 1000.0 MiB of 1.0 GiB"),
        (fitting(runs_out_at=moment()), 1, "Probably does not fit"),
        (too_large(), 1, "Does not fit: 3.0 GiB of 2.0 GiB"),
    ],
)
def test_the_exit_code_says_whether_it_fits(call, job, predicting, prediction, code, words):
    predicting(prediction)
    done = call("predict", job)
    assert (done.code, done.err) == (code, "")
    assert words in done.out


def test_without_options_the_job_is_predicted_as_it_is(call, job, predicting):
    asked = predicting(fitting())
    call("predict", job)
    assert asked == [
        {
            "batch_size": 16,
            "precision": "fp32",
            "device": None,
            "limit_bytes": None,
            "micro_batch": None,
            "search": False,
            "what_if": False,
            "lengths": None,
            "calibration": None,
            "started": None,
        }
    ]


def test_every_option_arrives(call, job, predicting, tmp_path):
    asked = predicting(fitting())
    options = ["--device", "rtx3060", "--budget", "8GiB", "--set", "batch_size=64", "--set", "steps=5"]
    (tmp_path / "lengths.txt").write_text("3\n12\n")
    call("predict", job, *options, "--micro-batch", 32, "--search", "--what-if", "--lengths", tmp_path / "lengths.txt")
    assert asked == [
        {
            "batch_size": 64,
            "precision": "fp32",
            "device": "rtx3060",
            "limit_bytes": 8192 * MIB,
            "micro_batch": 32,
            "search": True,
            "what_if": True,
            "lengths": [3, 12],
            "calibration": None,
            "started": None,
        }
    ]


@pytest.mark.parametrize("prediction", [fitting(), too_large()])
def test_json_is_the_record_and_nothing_else(call, job, predicting, prediction):
    predicting(prediction)
    done = call("predict", job, "--json")
    (line,) = done.out.splitlines()
    assert (done.code, done.err) == (0 if prediction.fits else 1, "")
    assert Prediction.from_json(line) == prediction


def test_a_page_is_written_its_path_printed_and_the_verdict_told_to_people(call, job, predicting, tmp_path):
    predicting(too_large())
    page = tmp_path / "a.html"
    done = call("predict", job, "-o", page)
    assert (done.code, done.out) == (1, f"{page}\n")
    assert done.err.startswith("Does not fit: 3.0 GiB of 2.0 GiB")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_a_record_is_written_that_report_shows(call, job, predicting, tmp_path):
    predicting(fitting())
    record = tmp_path / "A.JSON"
    printed = call("predict", job, "-o", record, "--json").out
    assert record.read_text(encoding="utf-8") == printed
    assert call("report", record).out == call("predict", job).out


def test_nothing_is_overwritten_without_force(call, refused, job, predicting, tmp_path):
    asked = predicting(fitting())
    page = tmp_path / "a.html"
    page.write_text("mine")
    message = refused("predict", job, "-o", page)
    assert message == f"error: {page} exists already and is not overwritten: give another -o, or --force\n"
    assert (page.read_text(), asked) == ("mine", [])
    assert call("predict", job, "-o", page, "--force").code == 0
    assert page.read_text(encoding="utf-8") != "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "much"], "--budget: cannot read 'much' as a size"),
        (["--set", "batchsize=3"], "batch_size"),
        (["--micro-batch", 0], "--micro-batch 0 is not a part of the job's batch of 16: give 1 to 16"),
        (["--micro-batch", 17], "or change the batch with --set batch_size=17"),
        (["-o", "a.pdf"], "cannot write a.pdf: its suffix is not .html or .json: give -o a name with one of them"),
        (["-o", "no-such-folder/a.html"], "the folder no-such-folder does not exist; create it, or give another -o"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_work(call, job, predicting, options, message):
    asked = predicting(fitting())
    done = call("predict", job, *options)
    assert (done.code, done.out, asked) == (2, "", [])
    assert done.err.startswith("error: ")
    assert message in done.err


def test_a_job_that_is_not_there_is_refused(refused, tmp_path):
    assert "there is no job file at" in refused("predict", tmp_path / "none.yaml")


def test_json_says_what_went_wrong(failed_as_json, job, predicting, tmp_path):
    message = "no device is called rtx1: use --device rtx3060"
    predicting(DeviceError(message))
    assert failed_as_json("predict", job, "-o", tmp_path / "a.json") == {
        "error": "DeviceError",
        "message": message,
        "exit_code": 2,
    }
    assert not (tmp_path / "a.json").exists()


def test_ctrl_c_is_said_in_a_line(failed_as_json, job, predicting):
    predicting(KeyboardInterrupt())
    message = "predicting was stopped before it had a result: run the same command again"
    assert failed_as_json("predict", job) == {"error": "Interrupted", "message": message, "exit_code": 130}


@pytest.mark.parametrize("content", [None, "3\nfour\n"])
def test_lengths_that_cannot_be_read_are_refused(call, job, predicting, tmp_path, content):
    predicting(fitting())
    if content is not None:
        (tmp_path / "lengths.txt").write_text(content)
    done = call("predict", job, "--lengths", tmp_path / "lengths.txt")
    assert done.code == 2
    assert "cannot read lengths from" in done.err
    assert "give a file with one whole number per line" in " ".join(done.err.split())
