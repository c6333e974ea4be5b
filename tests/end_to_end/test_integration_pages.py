"""The programs in docs/integrations run as printed; a second program of a page continues after the first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "integrations"


@pytest.mark.parametrize("name", ["accelerate", "lightning", "plain-pytorch"])
def test_the_example_runs(name, tmp_path):
    programs = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(programs)],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    if name == "plain-pytorch":
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "2", "3", "4"]
