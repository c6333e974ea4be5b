"""The published files: the wheel and the source archive are complete, and an installed wheel works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FOLDERS = ("src", "tests", "docs", "benchmarks")
CACHES = ("__pycache__", "*.pyc", "*.egg-info", ".*_cache", ".hypothesis", "*.tmp-*")
BUILD = """
import sys
from setuptools import build_meta

out = sys.argv[1]  # which setuptools changes
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository's files for building."""
    tree = tmp_path_factory.mktemp("tree")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(*CACHES))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tree)
    return tree


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the wheel and the source archive."""
    out = tmp_path_factory.mktemp("dist")
    files = files_in(tree)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=tree, check=True, capture_output=True, text=True)
    for path in files_in(tree) - files:
        (tree / path).unlink()  # leftovers of the build
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, archive


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_wheel_has_the_whole_package_and_nothing_else(built: tuple[Path, Path], tree: Path):
    names = names_in_wheel(built[0])
    package = {name for name in names if ".dist-info/" not in name}
    assert package == {f"plimsoll/{name}" for name in files_in(tree / "src" / "plimsoll")}
    assert {"plimsoll/py.typed", "plimsoll/report/templates/run.html", "plimsoll/report/vendor/LICENSE"} <= package
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_archive_has_what_is_needed_to_build_and_to_test(built: tuple[Path, Path], tree: Path):
    with tarfile.open(built[1]) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    missing = {name for name in files_in(tree) if not name.startswith("src/torch_plimsoll")} - names
    assert not missing
    made = {name for name in names - files_in(tree) if ".egg-info/" not in name}
    assert made == {"PKG-INFO", "setup.cfg"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_has_a_pin_that_meets_it():
    """`make install` and continuous integration install exactly these versions."""
    extras = PROJECT["optional-dependencies"]
    required = [Requirement(text) for texts in (PROJECT["dependencies"], *extras.values()) for text in texts]
    pinned = pins()
    assert {item.name for item in required if canonicalize_name(item.name) not in pinned} == set()
    assert [str(item) for item in required if not item.specifier.contains(pinned[canonicalize_name(item.name)])] == []


JOB = """
model: {architecture: lstm, embedding_size: 8, hidden_size: 8}
data: {train: texts.txt}
tokenizer: {vocab_size: 300}
sequence_length: 32
batch_size: 8
steps: 2
device: cpu
"""

TYPED = """
from plimsoll import TrainStep
from plimsoll.records.units import parse_bytes

reveal_type(parse_bytes("1GiB"))
parse_bytes(None)


def f(step: TrainStep) -> None:
    reveal_type(step.micro_batch)
"""


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with the wheel and with the requirements as installed here; return its Python."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run_installed(python, folder, "python", "-m", "pip", "install", "--no-deps", "--no-index", str(built[0]))
    run_installed(python, folder, "python", "-m", "pip", "uninstall", "--yes", "setuptools")  # an old one from Python
    site = run_installed(
        python, folder, "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    ).strip()
    # A path, not a package folder: its .pth files, through which Plimsoll is installed here, are not read.
    Path(site, "requirements-of-the-tests.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return python


def run_installed(python: Path, folder: Path, *command: str) -> str:
    """Run a command of the environment in a folder outside the checkout, with an initially empty home."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PLIMSOLL"))}
    environment = kept | {"HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment.pop("XDG_CACHE_HOME", None)
    first, *others = command
    done = subprocess.run(
        [str(python.parent / first), *others], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_installed_wheel_trains_and_reports(installed: Path, tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB, "utf-8")
    (tmp_path / "texts.txt").write_text("".join(f"line {number} on the hull\n" for number in range(2000)), "utf-8")
    where = run_installed(installed, tmp_path, "python", "-c", "import plimsoll; print(plimsoll.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parents[1])
    assert "train" in run_installed(installed, tmp_path, "plimsoll", "--help")
    run_installed(installed, tmp_path, "plimsoll", "train", "job.yaml", "--out", "runs/a", "--json")
    run_installed(installed, tmp_path, "plimsoll", "report", "runs/a", "-o", "a.html")
    assert "<html" in (tmp_path / "a.html").read_text("utf-8")
    run_installed(installed, tmp_path, "python", "-m", "pip", "check")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # mypy reads torch, too
def test_mypy_sees_the_types_of_the_installed_wheel(installed: Path, tmp_path: Path):
    (tmp_path / "typed.py").write_text(TYPED, "utf-8")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed), "--config-file", "", "typed.py"]
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MYPYPATH"}}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    said = re.sub(r"typed\.py:\d+: ", "", done.stdout)
    assert 'Revealed type is "int"' in said.replace("builtins.int", "int"), said
    assert 'Revealed type is "int | None"' in said.replace("builtins.int", "int").replace(
        "Union[int, None]", "int | None"
    )
    assert 'Argument 1 to "parse_bytes" has incompatible type "None"' in said
    assert "import-untyped" not in said
