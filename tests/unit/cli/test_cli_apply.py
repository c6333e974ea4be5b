"""`plimsoll apply`: its options, output and exit codes. Tests of the modules cover the work itself."""

import json

import pytest

from model_folders import model_folder, read_rows, write_rows
from plimsoll.models.generation import Generation


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "x.jsonl", ["w1 w2", "w3"])


def test_it_writes_the_results_and_shows_what_was_done(call, model, data, tmp_path):
    done = call("apply", model, "--data", data, "--out", tmp_path / "y.jsonl", "--keep", "id", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert "Tokens" in done.out
    assert [row["id"] for row in read_rows(tmp_path / "y.jsonl")] == ["t0", "t1"]


def test_json_is_one_record(call, model, data, tmp_path):
    done = call("apply", model, "--data", data, "--out", tmp_path / "y.jsonl", "--json", "--task", "embed")
    facts = json.loads(done.out)
    assert (facts["record"], facts["task"], facts["num_rows"]) == ("apply", "embed", 2)


def test_a_failure_is_one_record_too(call, model, data, tmp_path):
    (tmp_path / "y.jsonl").touch()
    done = call("apply", model, "--data", data, "--out", tmp_path / "y.jsonl", "--json")
    failure = json.loads(done.out)
    assert (done.code, failure["error"], failure["exit_code"]) == (2, "OutputError", 2)
    assert "give another --out, or --force" in failure["message"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "int8"], "--dtype int8 is not supported for weights"),
        (["--quantize", "int3"], "--quantize int3 is not supported: give int8 or int4"),
        (["--budget", "much"], "--budget: cannot read"),
        (["--temperature", "1"], "--temperature 1.0 needs --max-new-tokens"),
        (["--max-new-tokens", "0"], "generates nothing"),
        (["--max-new-tokens", "5", "--temperature", "0"], "is not a finite number above 0"),
        (["--max-new-tokens", "5", "--top-p", "1.5"], "is not a probability"),
        (["--cache", "offloaded"], "--cache offloaded needs --max-new-tokens"),
        (["--max-new-tokens", "5", "--cache", "small"], "--cache small is not supported"),
        (["--task", "generate", "--max-new-tokens", "5", "--cache", "offloaded"], "--cache offloaded moves keys"),
        (["--adapter", "nowhere"], "nowhere"),
        (["--max-new-tokens", "5"], "give --task generate with --max-new-tokens"),
        (["--task", "sing"], "no task `sing`"),
        (["--device", "tpu"], "no device 'tpu'"),
        pytest.param(["--budget", "1MiB"], "1.0 MiB", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_meant_is_refused(call, model, data, tmp_path, options, said):
    done = call("apply", model, "--data", data, "--out", tmp_path / "y.jsonl", *options)
    assert done.code == 2
    assert said in done.err


def test_the_first_row_of_a_csv_is_a_row_if_that_is_said(call, model, tmp_path):
    (tmp_path / "x.csv").write_text("2,w1\n4,w3\n")  # the first row contains a 2, which could be a column name
    options = ["--column", "2", "--no-header", "--keep", "1", "--out", tmp_path / "y.jsonl", "--quiet"]
    assert call("apply", model, "--data", tmp_path / "x.csv", *options).code == 0
    assert [row["1"] for row in read_rows(tmp_path / "y.jsonl")] == ["2", "4"]


def test_results_are_json_lines(call, model, data, tmp_path):
    done = call("apply", model, "--data", data, "--out", tmp_path / "y.csv")
    assert (done.code, "give it a name that ends in .jsonl" in done.err) == (2, True)


def test_options_come_to_the_work(call, monkeypatch, model, data, tmp_path):
    asked = []

    def stopped(*arguments, **named):
        asked.append((arguments, named))
        raise KeyboardInterrupt

    monkeypatch.setattr("plimsoll.inference.apply.apply_model", stopped)
    options = ["--task", "generate", "--max-new-tokens", 5, "--temperature", 0.5, "--seed", 3, "--batch-size", 8]
    done = call("apply", model, "--data", data, "--out", tmp_path / "y.jsonl", *options, "--budget", "1GiB", "--force")
    assert done.code == 130
    assert "run the same command again to continue" in done.err
    ((arguments, named),) = asked
    assert arguments[:3] == (model, data, tmp_path / "y.jsonl")
    assert arguments[3].generation == Generation(5, 0.5, 1.0, 3)
    assert (arguments[3].rows_per_pass, arguments[3].limit_bytes, named["force"]) == (8, 1 << 30, True)
