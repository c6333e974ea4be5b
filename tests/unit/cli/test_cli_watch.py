import json
import os

from typer.testing import CliRunner

from plimsoll.cli.main import app
from plimsoll.errors import OutputError
from plimsoll.records.watch import WatchRecord


def _watch(*words):
    return CliRunner().invoke(app, ["watch", "--pid", str(os.getpid()), "--every", "0.1", "--samples", "2", *words])


def test_a_line_for_every_sample_and_the_same_in_the_file(tmp_path):
    file = tmp_path / "watch.jsonl"
    result = _watch("--record", str(file))
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == len(WatchRecord.read(file).samples) == 2
    assert "memory of the machine" in result.stdout


def test_json_is_one_record():
    record = WatchRecord.from_json(_watch("--json").stdout)
    assert record.samples[0].processes[0].pid == os.getpid()


def test_a_file_that_is_there_is_left_alone(tmp_path):
    file = tmp_path / "notes"
    file.write_text("mine")
    result = _watch("--record", str(file), "--json")
    assert isinstance(result.exception, OutputError)
    assert json.loads(result.stdout)["error"] == "OutputError"
    assert file.read_text() == "mine"
