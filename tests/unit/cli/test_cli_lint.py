"""``plimsoll lint``: its output and exit codes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll.cli.main import app

LABELLED = Path(__file__).parents[4] / "shared" / "data" / "lint"
BAD = "import torch\nstate = torch.load('a.pt')\n"
RULE = "torch_load_without_map_location_or_mmap"


def lint(*arguments: object):
    return CliRunner().invoke(app, ["lint", *map(str, arguments)])


@pytest.fixture
def bad(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(BAD)
    return path


def test_lines_for_people_and_1(bad):
    answer = lint(bad)
    assert answer.exit_code == 1
    assert f"train.py:2:9: {RULE}: " in answer.stdout
    assert "1 finding in 1 file, 2 lines." in answer.stdout


def test_nothing_found_and_0(tmp_path):
    (tmp_path / "a.py").write_text("import torch\n")
    answer = lint(tmp_path)
    assert (answer.exit_code, answer.stdout) == (0, "Nothing found in 1 file, 1 lines.\n")
    assert lint(tmp_path, "--format", "github").stdout == ""


def test_each_format_is_that_and_nothing_else(bad):
    assert [(one["line"], one["rule"]) for one in json.loads(lint(bad, "--format", "json").stdout)] == [(2, RULE)]
    assert json.loads(lint(bad, "--format", "sarif").stdout)["version"] == "2.1.0"
    assert lint(bad, "--format", "github").stdout.startswith("::warning file=")
    assert json.loads(lint(bad, "--json").stdout)["record"] == "lint"


def test_what_was_not_checked_is_said_beside_the_list(bad):
    (bad.parent / "torn.py").write_text("import torch\ndef f(:\n")
    answer = lint(bad.parent, "--format", "json")
    assert len(json.loads(answer.stdout)) == 1
    assert "torn.py: not checked: line 2" in answer.stderr


@pytest.mark.parametrize("format", ["text", "json", "sarif", "github"])
def test_a_file_that_was_named_and_is_not_python_is_bad_input(bad, format):
    torn = bad.parent / "torn.py"
    torn.write_text("import torch\ndef f(:\n")
    answer = lint(bad, torn, "--format", format)
    assert answer.exit_code == 2
    assert "torn.py: not checked: line 2" in answer.stdout + answer.stderr
    assert lint(bad.parent).exit_code == 1  # a file in a folder may be a template
    bad.unlink()
    assert lint(bad.parent).exit_code == 0


def test_rules_are_left_out_or_chosen(bad):
    assert lint(bad, "--ignore", RULE).exit_code == 0
    assert lint(bad, "--select", "loss_graph_kept").exit_code == 0
    assert lint(bad, "--select", RULE).exit_code == 1
    answer = lint(bad, "--ignore", "nothing_such")
    assert answer.exit_code != 0
    assert "--ignore nothing_such: there is no such rule: give one of" in str(answer.exception)


def test_a_path_that_is_not_there_is_bad_input(tmp_path):
    answer = lint(tmp_path / "nowhere.py", "--json")
    assert json.loads(answer.stdout)["error"] == "InputError"


def test_the_labelled_snippets_are_found_and_nothing_else():

    if not (LABELLED / "labels.jsonl").exists():
        pytest.skip("the labelled snippets are not part of the repository")
    labels = [json.loads(line) for line in (LABELLED / "labels.jsonl").read_text("utf-8").splitlines()]
    found = json.loads(lint(LABELLED / "snippets", "--format", "json").stdout)
    for label in labels:
        got = {(one["line"], one["rule"]) for one in found if one["file"].endswith(label["file"])}
        for mistake in label["mistakes"]:
            places = {(line, mistake["rule"]) for line in (mistake["line"], *mistake.get("accept_lines", []))}
            assert mistake.get("uncertain") or got & places, (label["file"], mistake)
            got -= places
        assert not got, label["file"]
