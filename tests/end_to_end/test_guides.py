"""Every command, program and job of the tutorials and guides runs as printed, in an empty folder."""

import ast
import re

import pytest

from pages import ROOT, blocks_of, faults_of
from plimsoll.records.job import Job

DOCS = ROOT / "docs"
# The pages of the groups Tutorials and Guides that are one session from top to bottom. `docs/tutorial.md` and
# `docs/from-a-script.md` have their own tests in `tests/test_documentation.py`.
GUIDES = [
    "tutorial-trainer.md",
    "guides/fit-a-model-on-12-gb.md",
    "data.md",
    "recurrent.md",
    "embeddings.md",
    "larger_than_memory.md",
    "shrink.md",
    "distributed.md",
    "my-run-died.md",
]
ALL = ["../README.md", "tutorial.md", "from-a-script.md", *GUIDES]
FENCE = re.compile(r"(?:^<!-- (?P<not_run>not run: .+?) -->\n)?^```(?P<language>\w*)\n.*?^```$", re.M | re.S)
RUN = {"python", "yaml", "console"}
MOST_NOT_RUN = 3


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_runs_as_printed(name, tmp_path):
    assert list(faults_of(DOCS / name, tmp_path)) == []


@pytest.mark.parametrize("name", ALL)
def test_every_block_is_run_or_has_a_reason_not_to_be(name, tmp_path):
    """This is the cheap part of the test above: it also compiles the programs and checks the jobs."""
    blocks = list(FENCE.finditer((DOCS / name).read_text(encoding="utf-8")))
    assert not [block[0] for block in blocks if not block["not_run"] and block["language"] not in RUN]
    assert sum(block["not_run"] is not None for block in blocks) <= MOST_NOT_RUN
    run = list(blocks_of(DOCS / name))
    assert len(run) == sum(block["not_run"] is None for block in blocks)
    for block in run:
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "yaml":
            assert block.file, "a job needs its name in the first line, as in # job.yaml"
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
            assert Job.from_yaml(tmp_path / block.file).steps


@pytest.mark.parametrize("name", ALL)
def test_no_code_is_indented(name):
    """Indented code has no language, so no test would run it."""
    prose = FENCE.sub("", (DOCS / name).read_text(encoding="utf-8"))
    assert not re.findall(r"\n\n( {4}\S.*)\n", prose)


def test_the_first_command_of_a_guide_runs_as_printed(tmp_path):
    """This is the cheap part of the test of docs/data.md, which runs the code on a page in the same way."""
    page = DOCS / "data.md"
    corpus, job, session = list(blocks_of(page))[:3]
    (tmp_path / "page.md").write_text(
        f"```python\n{corpus.text}```\n```yaml\n{job.text}```\n```console\n$ {session.commands[0].text}\n```\n", "utf-8"
    )
    assert list(faults_of(tmp_path / "page.md", tmp_path)) == []
    assert (tmp_path / "reviews.jsonl").is_file()
