"""Results of benchmarks: their files, the parts that pages show, and the driver."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench  # noqa: E402
import readme  # noqa: E402
from _results import Result, circumstances, errors_table, file_result, newest, shown, table, versions_in  # noqa: E402

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


def file(folder: Path, what: str, date: str, part: str, device: str = "cpu") -> Path:
    path = folder / f"{what}-{device}-{date}.md"
    made = f"Made by `python benchmarks/{what}.py` on {date}: a machine; Python 3."
    path.write_text(f"# T\n\n<!-- readme -->\n{part}\n<!-- /readme -->\n\nall of it\n\n{made}\n", encoding="utf-8")
    return path


# -- README.md ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", readme.PAGES, ids=lambda path: path.name)
def test_a_page_shows_the_newest_results(path):
    page = path.read_text(encoding="utf-8")
    assert readme.rewritten(page, to_root=readme.to_root_from(path)) == page, "run `python benchmarks/readme.py`"


def test_every_result_that_a_page_shows_is_made_by_the_driver():
    made = {name for one in bench.BENCHMARKS for name in one.results or (one.name,)}
    shown_names = {name for path in readme.PAGES for name in readme.names_on(path.read_text(encoding="utf-8"))}
    assert shown_names <= {*made, *bench.ELSEWHERE}


def test_links_of_a_page_lead_out_of_its_folder(tmp_path):
    file(tmp_path, "a", "2026-01-02", "new")
    page = readme.rewritten("<!-- table a -->\n<!-- /table -->\n", tmp_path, readme.to_root_from(readme.PAGES[1]))
    assert "](../benchmarks/results/a-cpu-2026-01-02.md)" in page


def test_every_marker_is_closed():
    marks = re.findall(r"<!-- (/?)table ?([a-z0-9 -]*) ?-->", PAGE)
    assert [closes for closes, _ in marks] == ["", "/"] * (len(marks) // 2)


def test_what_stands_between_markers_is_replaced_by_the_newest_part_and_what_made_it(tmp_path):
    file(tmp_path, "a", "2026-01-02", "new")
    file(tmp_path, "a", "2026-01-01", "old")
    file(tmp_path, "a-b", "2026-01-03", "another")
    page = readme.rewritten("x\n<!-- table a -->\nstale 5\n<!-- /table -->\ny\n", tmp_path)
    assert page.splitlines() == [
        "x", "<!-- table a -->", "new", "",
        "<sub>[a, 2026-01-02](benchmarks/results/a-cpu-2026-01-02.md): "
        "`python benchmarks/a.py`; a machine; Python 3</sub>",
        "<!-- /table -->", "y",
    ]  # fmt: skip
    assert readme.rewritten(page, tmp_path) == page


def test_a_result_that_is_not_there_yet_is_said(tmp_path):
    assert readme.shown(["a"], tmp_path) == "Not measured yet: `a`."


def test_a_result_without_its_part_is_refused(tmp_path):
    path = file(tmp_path, "a", "2026-01-02", "")
    path.write_text("# T\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"a-cpu-2026-01-02\.md has no part for README\.md"):
        readme.shown(["a"], tmp_path)


def test_tables_with_the_same_header_and_lists_go_on_with_each_other():
    one, two, three = (table(("a", "b"), [(number, 0)]) for number in "123")
    other = table(("a", "c"), [(4, 0)])
    assert readme.joined([f"{one}\n\nsaid", two, "- x", other, "- y", three]) == "\n".join(
        [
            *("| a | b |", "| --- | --: |", "| 1 | 0 |", "| 2 | 0 |", "| 3 | 0 |", "", "said", "", "- x", "- y", ""),
            *("| a | c |", "| --- | --: |", "| 4 | 0 |"),
        ]
    )


# -- results -----------------------------------------------------------------------------------------------------------


def test_every_result_is_named_by_what_device_and_date():
    assert [Result.read(path).date for path in (ROOT / "benchmarks" / "results").glob("*.md")]


def test_a_result_that_is_filed_is_read_again(tmp_path):
    command = ["/anywhere/benchmarks/x.py", "--data", "/home/a/text.csv", "--out", "/tmp/r", "--rounds", "2"]
    file_result(tmp_path, "what", "Title", "text", "| a |", threads=1, packages=("numpy",), command=command)
    found = newest("what", tmp_path)
    assert (found.part, found.made["command"]) == ("| a |", "python benchmarks/x.py --data text.csv --rounds 2")
    text = found.path.read_text(encoding="utf-8")
    assert text.startswith("# Title\n\n<!-- readme -->\n| a |\n<!-- /readme -->\n\ntext\n\nMade by `")
    assert os.uname().nodename not in text.splitlines()[-1]


def test_nothing_is_filed_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file_result(None, "what", "Title", "text")
    assert not list(tmp_path.iterdir())


def test_what_a_command_shows():
    assert shown(["benchmarks/x.py", "--texts=/a/b.csv", "--work=/tmp/x", "--only", "one two"]) == (
        "python benchmarks/x.py --texts=b.csv --only 'one two'"
    )


def test_the_circumstances_say_processor_threads_load_and_versions():
    said = circumstances(threads=1, packages=("numpy", "no-such-package"))
    assert re.fullmatch(r"[^;]+, \d+ cores?, 1 thread, load \d+\.\d; Python \d[\w.]+, numpy \d[\w.]+, \w+ [\d.]+", said)


def test_versions_of_another_environment():
    assert re.fullmatch(r"numpy \d[\w.]+", *versions_in(Path(sys.executable), ["numpy"]))


def test_errors_are_sized_and_ordered():
    errors = [0.0] * 8 + [-0.05, 0.2]
    assert errors_table(("x", errors)).splitlines()[-1] == "| x | 10 | 0 | 5.0% | 20.0% |"


# -- the driver --------------------------------------------------------------------------------------------------------


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "newest", lambda what: newest(what, tmp_path / "results"))
    return {"NEWS": [], "TEXT": [tmp_path / "a.txt", tmp_path / "b.txt"], "FOLDER": [tmp_path]}


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_what_a_benchmark_prints_is_filed(tmp_path, given):
    path = script(tmp_path, '"""What it is.\n\nMore."""\nimport sys\nprint("found", *sys.argv[1:])\n')
    one = bench.Benchmark("printed", 1, ("--text=TEXT",), prints=True, script=path)
    assert bench.run(one, "", given) == ""
    text = newest("printed", tmp_path / "results").path.read_text(encoding="utf-8")
    assert text.startswith(
        f"# What it is\n\n```\nfound --text={tmp_path}/a.txt --text={tmp_path}/b.txt\n```\n\nMade by `"
    )


def test_a_benchmark_that_fails_is_said_with_its_last_line(tmp_path, given):
    one = bench.Benchmark("fails", 1, script=script(tmp_path, "raise SystemExit('no room\\nfor it')"))
    assert bench.run(one, "", given) == "failed: fails: for it"


def test_a_benchmark_that_files_nothing_has_failed(tmp_path, given):
    one = bench.Benchmark("silent", 1, script=script(tmp_path, ""))
    assert bench.run(one, "", given) == "failed: silent: it filed no result"


def test_what_cannot_run_is_left_out(given):
    assert bench.run(bench.Benchmark("no-such", None), "", given) == "left out: no-such: there is no no_such.py"
    needs = bench.Benchmark("demo", 1, ("--data=NEWS",))
    assert bench.run(needs, "", given) == "left out: demo: needs --news"


def test_every_script_of_the_driver_is_there():
    assert not [one.name for one in bench.BENCHMARKS if not one.path.is_file()]


def test_the_usual_benchmarks_fit_into_half_an_hour():
    assert sum(one.minutes for one in bench.BENCHMARKS if one.usual) <= 30
