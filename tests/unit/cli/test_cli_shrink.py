"""`plimsoll shrink`: its options and refusals. Tests of the modules cover the work itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shrink_records import shrunk


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "much"], "--target: cannot read 'much' as a size"),
        (["--target", "1MiB", "--method", "int8"], "--method int8 fixes the chain, --target 1MiB searches"),
        (["--method", "int8", "--forbid", "layers"], "leave out --forbid layers"),
        (["--method", "layers("], "cannot read 'layers(' as a choice"),
        (["--method", "laers"], "there is no method `laers`; did you mean `layers`"),
        (["--method", "heads=1.5"], "`share` 1.5 is not a share to remove"),
        (["--recover", "-1"], "--recover -1 is not a number of steps: give 0 or more"),
        (["--budget", "1GiB"], "--budget 1GiB applies only to training: give --recover"),
        (["--tries", "0"], "--tries 0 leaves nothing to measure"),
        (["--samples", "0"], "--samples 0 leaves nothing to measure"),
        ([], "there is no model in"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(call, options, said, tmp_path):
    done = call("shrink", tmp_path / "nowhere", "--out", tmp_path / "small", *options, "--json")
    failure = json.loads(done.out)
    assert done.code == 2
    assert said in failure["message"]
    assert not (tmp_path / "small").exists()


def test_the_record_in_a_folder_is_shown_by_report(call, tmp_path):
    shrunk().save(tmp_path / "shrink.json")
    assert "layers=2 > int8: 16.0 MiB -> 3.0 MiB" in " ".join(call("report", tmp_path).out.split())


def test_what_is_mistyped_is_refused_before_torch_is_imported(tmp_path):
    program = "import sys; from plimsoll.cli.main import main; sys.argv[0] = 'plimsoll'\ntry: main()\n"
    program += "except SystemExit as end: sys.exit(99 if 'torch' in sys.modules else end.code)"
    arguments = ["shrink", "model", "--method", "heads=1.5", "--out", str(tmp_path / "small")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, "`share` 1.5 is not" in done.stderr) == (2, True)
