"""`make gpu` without a GPU: its messages, its judgement, and the replay of its recording."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from benchmarks.gpu import __main__ as command  # noqa: E402
from benchmarks.gpu import (  # noqa: E402
    cases,
    compare,
    files,
    part_job,
    part_predictions,
    part_storm,
    part_tests,
)
from benchmarks.gpu.parts import Task, run  # noqa: E402

import plan_time_gpu  # noqa: E402

pytestmark = pytest.mark.cold  # its processes load no torch
GIB, MIB = 1 << 30, 1 << 20
HEADER = {
    "device": "NVIDIA H200", "capability": [9, 0], "num_sms": 132, "total_bytes": 141 * GIB, "torch": "2.11.0",
    "transformers": "5.17.0", "environment": {}, "recorded": "2026-11-27",
}  # fmt: skip


def by_hand(samples: int, checkpointing: bool, seconds: float, reserved_mib: int) -> dict:
    """Return a row as the recorder writes it; the first two of its four steps are not timed."""
    case = next(one for one in cases.by_hand() if (one.batch_size // one.accumulation, one.checkpointing) ==
                (samples, checkpointing))  # fmt: skip
    return {
        "id": case.id, "kind": "shared", "case": case.to_dict(), "status": "ok", "limit_bytes": None,
        "step_seconds": [9.0, 9.0, seconds, seconds], "peak_reserved_bytes": reserved_mib * MIB,
        "peak_allocated_bytes": reserved_mib * MIB, "before_allocated_bytes": 0, "outside_after_bytes": 500 * MIB,
    }  # fmt: skip


# From an H200 (benchmarks/recorded).
GRID = [by_hand(16, False, 0.153, 9174), by_hand(16, True, 0.201, 3008), by_hand(64, True, 0.167, 6874)]


def planned(limit_gib: int, seconds: float, **others: object) -> dict:
    choices = [{"technique": "checkpointing", "options": {"blocks": "all"}},
               {"technique": "micro_batch", "options": {"samples": 16}}]  # fmt: skip
    bounds = {"likely_seconds": 0.2, "low_seconds": 0.15, "high_seconds": 0.25}
    peak = {"likely_bytes": 3000 * MIB, "low_bytes": 2900 * MIB, "high_bytes": 3100 * MIB}
    return {
        "id": f"planned:{limit_gib}GiB", "kind": "planned", "limit_bytes": limit_gib * GIB, "ooms": 0, "seconds": 40.0,
        "choices": "checkpointing=all + micro_batch=16", "techniques": choices, "peak": 3000 * MIB,
        "step_seconds": [9.0, 9.0, seconds, seconds], "predicted_seconds": bounds, "predicted_allocated": peak,
        **others,
    }  # fmt: skip


def task_with(folder: Path, rows: list[dict], device: str = "cuda:0") -> Task:
    path = folder / "recording.json.gz"
    files.write_recording(path, {"format": files.FORMAT, "header": HEADER, "runs": rows})
    return Task("part", device, folder, path, folder / "rows.jsonl", time.monotonic() + 60)


def said(task: Task) -> list[dict]:
    return [json.loads(line) for line in task.rows.read_text().splitlines()]


def faults(task: Task) -> list[str]:
    return [row["what"] for row in said(task) if row["kind"] == "check" and not row["ok"]]


# -- before it begins --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(command.has_driver(), reason="this machine has a driver of a GPU")
def test_without_a_gpu_it_says_so_in_a_line_and_loads_no_torch():
    program = (
        "import sys; from benchmarks.gpu.__main__ import main; code = main([]); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.startswith("make gpu needs a GPU, and this machine has none")
    assert (done.stdout.count("\n"), done.stderr) == (1, "False\n")


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(command, "has_driver", lambda: True)
    found = command.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name in {"yaml", "plotly"} else found(name))
    assert command.main([]) == 2
    assert "lacks plotly, pyyaml: install them" in capsys.readouterr().out


def test_a_test_file_whose_imports_are_missing_is_left_out_by_name(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("import json, no_such_package\n")
    path = tmp_path / "test_it.py"
    path.write_text(
        "from helper import x\nimport pytest.mark\nfrom no_other import y\ndef f():\n    import not_asked\n"
    )
    monkeypatch.setattr(part_tests, "TESTS", tmp_path)
    assert part_tests.missing_modules(path) == ["no_other", "no_such_package"]


def test_every_part_can_be_found():
    assert len({part.name for part in command.PARTS}) == len(command.PARTS)
    assert [part.stage for part in command.PARTS] == sorted(part.stage for part in command.PARTS)
    for part in command.PARTS:
        assert (ROOT / "benchmarks" / "gpu" / f"{part.function.split(':')[0]}.py").is_file()


# -- a program of a part -----------------------------------------------------------------------------------------------

PROGRAM = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    print("it stops")
    sys.exit(130)
"""


def test_a_program_that_has_done_enough_is_interrupted(tmp_path):
    begun = tmp_path / "begun"
    done = run(task_with(tmp_path, []), "-c", PROGRAM, str(begun), enough=begun.exists)
    assert (done.code, done.last_line) == (130, "it stops")


def test_a_program_is_stopped_when_the_time_is_over(tmp_path):
    done = run(task_with(tmp_path, []), "-c", PROGRAM, str(tmp_path / "begun"), most_seconds=0.0)
    assert done.code is None
    assert done.last_line == "it said nothing"


# -- a command of parts ------------------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path) -> command.Session:
    task_with(tmp_path, [{"id": "part:demo", "kind": "part", "part": "demo", "seconds": 1.0}])
    options = command.parse(["--device", "cpu", "--minutes", "20"])
    return command.Session(options, tmp_path, tmp_path / "recording.json.gz")


def part_that(monkeypatch, program: str, **fields: object) -> command.Part:
    """Return a part whose process runs this program, which writes its lines with ``say``."""
    before = "import json, sys; say = lambda **row: open(sys.argv[sys.argv.index('--rows') + 1], 'a').write("
    monkeypatch.setattr(command, "OF_A_PART", ("-c", f"{before}json.dumps(row) + chr(10))\n{program}"))
    return replace(command.PARTS[0], **fields)


CHECK = "say(id='check:tests:x', kind='check', part='tests', what='x', measured={!r}, bound='1', ok={!r})"


def test_what_a_part_says_is_in_the_recording_and_it_is_done(session, monkeypatch, capsys):
    assert [part.name for part in session.wanted if part.name in {"tests", "demo"}] == ["tests"]
    part = part_that(monkeypatch, CHECK.format("1", True))
    session.run([part], together=False)
    kept = {row["id"]: row for row in files.read_recording(session.recording)["runs"]}
    assert kept.keys() == {"part:demo", "check:tests:x", "part:tests"}
    assert "tests" not in [part.name for part in session.wanted]
    assert "x | 1 | 1 | yes" in capsys.readouterr().out
    assert command.hand_over(session, 1.0) == 0


def test_a_fault_is_an_exit_code_of_1_and_is_done_again(session, monkeypatch, capsys):
    part = part_that(monkeypatch, CHECK.format("2", False))
    session.run([part], together=False)
    assert "tests" in [part.name for part in session.wanted]
    assert command.hand_over(session, 1.0) == 1
    assert "fault: x | 2 | 1 | NO" in capsys.readouterr().err
    session.run([part_that(monkeypatch, "pass")], together=False)
    assert "check:tests:x" not in {row["id"] for row in session.rows}  # results of an earlier try are removed
    assert command.hand_over(session, 1.0) == 0


def test_a_part_that_dies_is_a_fault_with_its_last_line(session, monkeypatch, capsys):
    session.run([part_that(monkeypatch, "raise ValueError('of the card')")], together=False)
    assert command.hand_over(session, 1.0) == 1
    assert "exit code 1: ValueError: of the card" in capsys.readouterr().err


def test_a_part_that_hangs_is_stopped_and_is_a_fault(session, monkeypatch):
    monkeypatch.setattr(command, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(command, "GRACE_SECONDS", 0.0)
    session.run([part_that(monkeypatch, "import time; time.sleep(60)", seconds=0.2)], together=False)
    assert [row["measured"] for row in session.rows if row["kind"] == "check"] == [
        "was stopped: its time was long over: silent"
    ]


def test_what_the_time_does_not_reach_is_said_and_is_no_fault(session, monkeypatch, capsys):
    session.run([part_that(monkeypatch, CHECK.format("1", True))], together=False)
    session.until = time.monotonic()
    session.run([command.PARTS[1]], together=False)
    assert command.hand_over(session, 1.0) == 0
    assert "| demo | nothing of it: the time was over | not reached |" in capsys.readouterr().out


LEFT = "say(id='left:tests:y', kind='left', part='tests', what='y')"


@pytest.mark.parametrize("again", [None, LEFT, CHECK.replace(":x", ":z").format("1", True)])
def test_a_fault_counts_until_a_try_of_its_part_reaches_a_check(session, monkeypatch, again):
    session.run([part_that(monkeypatch, CHECK.format("2", False))], together=False)
    later = command.Session(session.options, session.folder, session.recording)
    if again is None:
        later.until = time.monotonic()
    later.run([part_that(monkeypatch, again or "pass")], together=False)
    has_fault = "check:tests:x" in {row["id"] for row in later.rows}
    assert has_fault == (again is None or again == LEFT)
    assert command.hand_over(later, 1.0) == int(has_fault)


def test_a_command_without_one_check_is_not_green(session, monkeypatch, capsys):
    """This holds after an earlier command with checks too. If all requested parts are done, no check is needed."""
    session.run([part_that(monkeypatch, CHECK.format("1", True))], together=False)
    later = command.Session(session.options, session.folder, session.recording)
    assert command.hand_over(later, 1.0) == 0
    later.until = time.monotonic()
    later.run([command.PARTS[1]], together=False)
    assert command.hand_over(later, 1.0) == 1
    assert "not one check was made" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["device", "torch", "processor"])
def test_a_recording_of_another_machine_is_not_gone_on_with(tmp_path, monkeypatch, capsys, name):
    """The stand-in writes the header that the recorder would write on the GPU."""
    header, path = HEADER | {"processor": "a processor"}, tmp_path / "recording.json.gz"

    def write_header(words, **_):
        files.write_recording(Path(words[words.index("--out") + 1]), {"format": 1, "header": header, "runs": []})
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(command.subprocess, "run", write_header)
    options = command.parse(["--resume", "--out", str(path)])
    files.write_recording(path, {"format": 1, "header": header | {"recorded": "another day"}, "runs": []})
    assert command.begun(options, tmp_path) == path
    for content in (header | {name: "another"}, {key: value for key, value in header.items() if key != name}):
        files.write_recording(path, {"format": 1, "header": content, "runs": []})
        with pytest.raises(SystemExit) as ended:
            command.begun(options, tmp_path)
        assert ended.value.code == 2
        assert f"{name} {content.get(name)} there and {header[name]} here" in capsys.readouterr().out
    path.write_bytes(b"no recording")
    with pytest.raises(SystemExit) as ended:
        command.begun(options, tmp_path)
    assert ended.value.code == 2
    assert "cannot be read as a recording" in capsys.readouterr().out


def test_parts_leave_time_for_those_that_it_is_kept_for(session, monkeypatch):
    told: list[float] = []
    monkeypatch.setattr(command, "ended", lambda process, seconds: told.append(seconds) or process.wait())
    part = part_that(monkeypatch, "pass", seconds=1e9)
    session.run([part], together=False)
    kept = sum(other.kept_seconds for other in command.PARTS)
    assert kept > 0
    assert told[0] - command.GRACE_SECONDS == pytest.approx(1200 - kept, abs=30)


# -- the job -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit_gib", "best"), [(12, 0.153), (8, 0.167), (4, 0.201), (3, None)])
def test_the_best_by_hand_is_the_fastest_that_the_limit_holds_with_the_context(tmp_path, limit_gib, best):
    """The values 9,174 and 500 MiB exceed the rest of 8 GiB."""
    found = part_job.best_by_hand(task_with(tmp_path, GRID), limit_gib * GIB)
    assert (found and part_job.seconds_of(found)) == best


@pytest.mark.parametrize(("limit_gib", "seconds", "ooms", "num_faults"), [
    (4, 0.21, 0, 0), (4, 0.22, 0, 1), (4, 0.19, 1, 1), (2, 7.7, 0, 0), (2, 7.7, 2, 1),
])  # fmt: skip
def test_a_plan_is_held_to_the_best_by_hand(tmp_path, limit_gib, seconds, ooms, num_faults):
    """The value 0.21 is 1.04 times 0.201, and 0.22 is 1.09 times; at 2 GiB nothing by hand fits."""
    task = task_with(tmp_path, GRID)
    part_job.judge(task, planned(limit_gib, seconds, ooms=ooms))
    assert len(faults(task)) == num_faults


def test_predictions_of_a_plan_are_held_to_what_was_measured(tmp_path):
    task = task_with(tmp_path, [])
    part_predictions.judge_planned(task, planned(4, 0.2))
    assert faults(task) == []
    part_predictions.judge_planned(task, planned(4, 0.3, peak=2800 * MIB))
    assert [what.rpartition(", ")[2] for what in faults(task)] == ["peak", "time"]


def test_rows_of_the_recording_are_replayed_without_a_gpu():
    """A setting by hand and a plan with the same choices are equal work for the time model, except for the order."""
    recording = {"header": HEADER, "runs": [*GRID, planned(4, 0.2), {"id": "x", "kind": "check"}]}
    rows = list(plan_time_gpu.rows_of_recording(recording))
    assert [(row.kind, row.setting, row.seconds) for row in rows] == [
        ("step by hand", "micro_batch=16", 0.153),
        ("step by hand", "micro_batch=16 + checkpointing=all", 0.201),
        ("step by hand", "micro_batch=64 + checkpointing=all", 0.167),
        ("step with techniques", "checkpointing=all + micro_batch=16", 0.2),
    ]
    assert {row.card.name for row in rows} == {"NVIDIA H200"}
    assert rows[1].task[:2] == rows[3].task[:2]
    assert set(rows[1].task[2]) == set(rows[3].task[2])
    compared = [row["id"] for row in compare.comparable(recording)]
    assert compared == [row["id"] for row in GRID]


def test_small_cases_of_a_recording_are_the_first_that_a_test_predicts():
    small = {"id": "small", "case": cases.bases()[0].to_dict()}
    assert compare.of_first_cases([*GRID, small], 1) == [small]


def test_what_repeats_in_a_step_is_not_traced():
    many = next(one for one in cases.by_hand() if one.accumulation == 64)
    few = replace(cases.bases()[0], accumulation=4)
    assert [compare._in_short(case).accumulation for case in (many, few)] == [4, 4]
    assert compare._in_short(many).batch_size == 4
    assert compare._in_short(few) == few


# -- the storm ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def storms(tmp_path_factory) -> tuple[part_storm.Storm, part_storm.Trained, part_storm.Trained]:
    """Train once disturbed and once undisturbed."""
    storm = part_storm.Storm("cpu", True, 0.1, (4,), tmp_path_factory.mktemp("storm") / "saved.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_storm, "SAVE_EVERY", 2)
        disturbed = storm.train(3, disturbed=True)
    return storm, disturbed, storm.train(3)


def test_a_storm_leaves_no_trace(storms, tmp_path):
    storm, disturbed, calm = storms
    assert sum(disturbed.events.values()) > disturbed.events["evaluation"] > 0
    assert disturbed.digests == calm.digests
    assert len(set(calm.digests)) == 3
    task = task_with(tmp_path, [])
    part_storm.judge(task, "one way", storm, disturbed, calm)
    assert faults(task) == []
    assert storm.train(3, resume=True).digests == calm.digests[-1:]  # saved after step 2


@pytest.mark.parametrize(("change", "wrong"), [
    ({"digests": ["x"] * 3}, "weights after each step"),
    ({"losses": [1.0] * 3}, "losses"),
    ({"evaluations": [1.0]}, "evaluations"),
    ({"ledger": [(1, 4, 60)] * 3}, "every sample counts once"),
    ({"ledger": [(number, 4, 59) for number in range(1, 4)]}, "every sample counts once"),
])  # fmt: skip
def test_what_a_storm_changes_is_a_fault(storms, tmp_path, change, wrong):
    storm, disturbed, calm = storms
    task = task_with(tmp_path, [])
    part_storm.judge(task, "one way", storm, replace(disturbed, **change), calm)
    assert faults(task) == [f"one way: {wrong}"]


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "num_faults"), [("", 0), ("<skipped/>", 0), ("<failure/>", 2), ("<error/>", 2)])
def test_a_report_of_tests_is_read(tmp_path, inner, num_faults):
    report = tmp_path / "tests.xml"
    report.write_text(f"<testsuites><testsuite><testcase classname='a' name='b'>{inner}</testcase>"
                      "<testcase classname='a' name='c'/></testsuite></testsuites>")  # fmt: skip
    task = task_with(tmp_path, [])
    part_tests.judge(task, report, int(num_faults > 0))
    assert len(faults(task)) == num_faults
    assert said(task)[0]["what"] == "2 tests"


@pytest.mark.slow
def test_all_of_it_goes_through_on_a_processor(tmp_path):
    words = ["--device", "cpu", "--folder", str(tmp_path), "--out", str(tmp_path / "recording.json.gz")]
    words += ["--only", "grid", "storm", "recovery", "--minutes", "9"]
    for more in ([], ["--resume"]):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu", *words, *more], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
        assert json.loads(done.stdout.splitlines()[-1])["faults"] == 0
    assert "storm:" not in done.stdout  # already done
