"""The facts besides the job that determine an answer: the result is equal twice, and changes with each of them."""

import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from plimsoll import errors
from plimsoll.device import surroundings as module
from plimsoll.device.base import backend_for
from plimsoll.device.surroundings import may_have_gpu, surroundings


def changed(before):
    after = surroundings()
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD_X"])
def test_what_libraries_read_of_the_environment_counts(monkeypatch, name):
    before = surroundings()
    monkeypatch.setenv("UNRELATED", "1")
    assert changed(before) == set()
    monkeypatch.setenv(name, "3")
    assert changed(before) == {"environment"}


@pytest.mark.parametrize("name", ["torch-9.0.dist-info", "own.egg-info"])
def test_what_is_installed_counts_and_other_files_do_not(monkeypatch, tmp_path, name):
    before = surroundings()
    monkeypatch.syspath_prepend(tmp_path)
    module._distributions.cache_clear()
    (tmp_path / "notes.txt").touch()
    assert changed(before) == set()
    (tmp_path / name).mkdir()
    module._distributions.cache_clear()
    assert changed(before) == {"installed"}
    module._distributions.cache_clear()


def test_every_source_of_plimsoll_counts(monkeypatch, tmp_path):
    """The cases are a copy of some sources, a changed byte in one of them, and a changed name."""
    (tmp_path / "records").mkdir()
    for name in ("errors.py", "records/base.py"):
        (tmp_path / name).write_bytes((Path(errors.__file__).parent / name).read_bytes())
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "errors.py"))
    found = set()
    for change in (
        lambda: None,
        lambda: (tmp_path / "records/base.py").write_bytes((tmp_path / "records/base.py").read_bytes() + b"#"),
        lambda: (tmp_path / "records/base.py").rename(tmp_path / "records/other.py"),
    ):
        change()
        module._sources.cache_clear()
        found.add(surroundings()["plimsoll"])
    module._sources.cache_clear()
    assert len(found) == 3


@pytest.mark.parametrize("edited", ["package/technique.py", "package/helpers/arithmetic.py", "alone.py"])
def test_every_source_of_a_package_that_ships_techniques_counts(monkeypatch, tmp_path, edited):
    infos = tmp_path / "shipped-1.0.dist-info"
    for name in (
        "package/__init__.py",
        "package/technique.py",
        "package/helpers/arithmetic.py",
        "alone.py",
        "other.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise AssertionError('loaded')")
    infos.mkdir()
    entries = "one = package.technique:One\ntwo = alone:Two\nthree = not_there:Three"
    (infos / "entry_points.txt").write_text(f"[plimsoll.techniques]\n{entries}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = surroundings()
    for name, noticed in (("other.py", set()), (edited, {"techniques of others"})):
        (tmp_path / name).write_text("raise AssertionError('edited')")
        module._sources_of_others.cache_clear()
        assert changed(before) == noticed
    module._sources_of_others.cache_clear()


def test_a_driver_is_told_without_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_DRIVERS", (str(tmp_path / "none"),))
    assert not may_have_gpu()
    (tmp_path / "none").touch()
    assert may_have_gpu()


def test_the_machine_counts(monkeypatch, tmp_path):
    """Each fact is changed alone: container limits, processor, Python, kernel and libc."""
    before, probed = surroundings(), backend_for("cpu").probe()
    others = {
        "processor": {"name": "another"}, "cores": {"num_cores": probed.num_cores + 1},
        "memory": {"hardware_bytes": probed.hardware_bytes + 1}, "usable memory": {"capacity_bytes": 1 << 30},
    }  # fmt: skip
    for name, update in others.items():
        with monkeypatch.context() as patch:
            other = probed.model_copy(update=update)
            patch.setattr(module, "backend_for", lambda kind, other=other: SimpleNamespace(probe=lambda: other))
            assert changed(before) == {name}
    (tmp_path / "enabled").write_text("[never]")
    for name, owner, attribute, value in (
        ("python", sys, "version", "4.0"), ("kernel", platform, "release", lambda: "9.9"),
        ("libc", platform, "libc_ver", lambda: ("musl", "1")),
        ("processor", module, "_processor_flags", lambda: "none"),
        ("huge pages", module, "_HUGE_PAGES", tmp_path / "enabled"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            assert changed(before) == {name}


def test_where_there_is_no_driver_torch_has_no_gpu():
    import torch

    assert may_have_gpu() or not torch.cuda.is_available()
