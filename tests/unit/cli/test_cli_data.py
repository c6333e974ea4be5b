"""The inputs of `plimsoll data`, a job file or texts, and the place of its results."""

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("One.\nTwo.\n")


@pytest.mark.usefixtures("text")
def test_a_fault_in_a_change_is_told_where_it_is(call):
    done = call("data", "index", "a.txt", "--set", "data.unit=word")
    assert done.code == 2
    assert "job cannot be used:\n  data.unit: " in done.err
    assert "this is from --set 'data.unit=word'" in done.err


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize(("options", "folder"), [((), "home/data"), (("--cache", "here"), "here")])
def test_the_cache_is_the_one_given_or_the_users(call, tmp_path: Path, monkeypatch, options, folder):
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "home"))
    assert call("data", "index", "a.txt", "--quiet", *options).code == 0
    assert any((tmp_path / folder).iterdir())
