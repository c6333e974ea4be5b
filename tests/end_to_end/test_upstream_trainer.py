"""Upstream's own tests of the Trainer, without and with the adapter: tests that pass without it must pass with it.

    PLIMSOLL_TRANSFORMERS_TESTS=~/transformers pytest -m slow tests/end_to_end/test_upstream_trainer.py

The folder is a checkout of https://github.com/huggingface/transformers, best at the installed version. Its tests need
the packages ``parameterized`` and ``sentencepiece``. Tests that need the network, a GPU or a missing package fail or
are skipped without the adapter, and are then ignored.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("PLIMSOLL_TRANSFORMERS_TESTS", "")
NEEDED = ("parameterized", "sentencepiece")
LEAST_PASSED = 100  # of about 150 without a GPU and the network
OTHERS = ("distributed", "fsdp", "tpu", "context_parallel", "deepspeed", "accelerator")  # more than one device

EXPECTED_TO_DIFFER = {
    "test_adafactor_lr_none": "its schedule looks for gradients after the update, which has freed them",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="PLIMSOLL_TRANSFORMERS_TESTS names no checkout of transformers"),
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"upstream's tests need {' and '.join(NEEDED)}"),
]


def passed(folder: Path, *options: str) -> set[str]:
    """Run upstream's tests and return the names of those that passed."""
    tests = [
        str(path.relative_to(CHECKOUT))
        for path in sorted(Path(CHECKOUT, "tests", "trainer").glob("test_trainer*.py"))
        if not any(other in path.name for other in OTHERS)
    ]
    assert tests, f"{CHECKOUT} has no tests/trainer/test_trainer*.py"
    report = folder / "report.xml"
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider", "--timeout", "300"]
    # A compiler takes minutes for each of these few.
    command += ["-k", "not compile", f"--junitxml={report}", *options]
    subprocess.run(command, cwd=CHECKOUT, env=os.environ | settings, capture_output=True, timeout=3000, check=False)
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}" for case in cases if is_passed(case)}


def is_passed(case: ElementTree.Element) -> bool:
    return not {child.tag for child in case} & {"failure", "error", "skipped"}


def test_what_passes_plain_passes_with_the_adapter_on(tmp_path: Path):
    for name in ("plain", "protected"):
        (tmp_path / name).mkdir()
    plain = passed(tmp_path / "plain")
    protected = passed(tmp_path / "protected", "-p", "upstream_plugin")
    assert len(plain) >= LEAST_PASSED
    lost = {name for name in plain - protected if name.rpartition(".")[2] not in EXPECTED_TO_DIFFER}
    print(f"{len(plain)} passed plain, {len(plain & protected)} of them with the adapter")
    assert not lost
