"""The pages: links, commands, generated parts, and the output of their code."""

from __future__ import annotations

import ast
import builtins
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

import command_line
import indexes
import links
import outward
import python_api
from pages import ROOT, Block, blocks_of, faults_of, program_done, session_done
from plimsoll.cli.main import app

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
COMMANDS = dict(command_line.commands_of(typer.main.get_command(app), "plimsoll"))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# -- the pages themselves ----------------------------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of headings, as the site and repository viewers make them."""
    without_code = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = page.read_text(encoding="utf-8")
    for found in links.links_of(text):
        target = ROOT / links.in_the_repository(name_of(page), found[1])
        assert target.exists(), found[0]
        if found[2]:
            assert found[2].removeprefix("#") in anchors_of(target), found[0]


def pages_after(page: str) -> set[str]:
    """Return the pages one click away from a page or folder, as paths from the root.

    A click on a folder shows its index, as `docs/generate/indexes.py` makes it.
    """
    if (ROOT / page).is_dir():
        return {name_of(path) for path in indexes.pages_in(ROOT / page)} if page in indexes.HEADS else set()
    found = links.links_of((ROOT / page).read_text(encoding="utf-8")) if page.endswith(".md") else ()
    return {links.in_the_repository(page, link[1]) for link in found}


def far_pages(start: str, pages: set[str], after: Callable[[str], set[str]], clicks: int = 2) -> list[str]:
    """Return the pages that need more than ``clicks`` clicks."""
    reached = last = {start}
    for _ in range(clicks):
        last = {page for one in last for page in after(one)} - reached
        reached = reached | last
    return sorted(pages - reached)


@pytest.mark.parametrize("start", ["docs/index.md", "README.md"])
def test_every_page_is_within_two_clicks(start):
    results = {name_of(path) for path in indexes.pages_in(ROOT / "benchmarks" / "results")}
    pages = {name_of(page) for page in PAGES} - {"README.md"} | (results if start == "docs/index.md" else set())
    assert far_pages(start, pages, pages_after) == []


def test_a_page_that_takes_three_clicks_is_found():
    clicks = {"a": {"b"}, "b": {"c", "a"}, "c": {"d"}}
    assert far_pages("a", set("abcd"), lambda page: clicks.get(page, set())) == ["d"]


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n")[2]
    groups = re.findall(r"^  - (\w+):", nav, re.MULTILINE)
    assert groups == ["Start", "Tutorials", "Guides", "Reference", "Explanations", "Project"]
    named = set(re.findall(r"([\w./-]+(?:\.md|/))$", nav, re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if page not in named and f"{page.rpartition('/')[0]}/" not in named} == set()


def commands_on(page: Path) -> list[list[str]]:
    """Return the words of each plimsoll command in the sessions of a page."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    sessions = "\n".join(text for language, text in blocks if language in {"", "console"})
    lines = sessions.replace("\\\n", " ").splitlines()
    found = [re.search(r"(?<![\w./-])plimsoll [a-z].*", line) for line in lines if not line.startswith(("│", "    "))]
    return [re.split(r" {2,}| [#|&>;]|\|\|", match[0])[0].split() for match in found if match]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_on_a_page_exists(page):
    for words in commands_on(page):
        name = " ".join(words[:3]) if " ".join(words[:3]) in COMMANDS else " ".join(words[:2])
        assert name in COMMANDS, words
        known = {name for parameter in COMMANDS[name].params for name in [*parameter.opts, *parameter.secondary_opts]}
        used = {word.split("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
        assert used <= known | {"--help"}, words


# Names that the reader of a program on a page has: their training and its parts.
OF_THE_READER = {
    *("model", "optimizer", "loss", "loader", "batch", "dataset", "corpus", "tokenizer", "labels", "folder", "path"),
    *("train", "trainer", "accelerator", "module", "args", "step", "MyModel"),
}


def names_missing(page: Path) -> Iterator[str]:
    """Yield names that a program uses, but that neither the reader nor earlier programs of the page define."""
    known = {*vars(builtins), *OF_THE_READER}
    for block in blocks_of(page):
        if block.language != "python":
            continue
        nodes = list(ast.walk(ast.parse(textwrap.dedent(block.text))))
        for node in nodes:
            if isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                known.add(node.name)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                known.add(node.id)
        yield from (node.id for node in nodes if isinstance(node, ast.Name) and node.id not in known)


@pytest.mark.parametrize(
    # Rules and causes show parts of the reader's program; the log describes earlier versions.
    "page",
    [one for one in PAGES if one.parent.name not in {"rules", "causes"} and one.name != "LOG.md"],
    ids=name_of,
)
def test_a_program_on_a_page_can_be_compiled_and_says_where_its_names_are_from(page):
    assert not sorted(set(names_missing(page)))


def test_a_name_from_nowhere_is_found(tmp_path):
    (tmp_path / "page.md").write_text("```python\nmodel.carry(32)\nsamples = StreamDataset(store)\nsamples\n```\n")
    assert [*names_missing(tmp_path / "page.md")] == ["StreamDataset", "store"]


def test_a_session_is_cut_into_commands_and_what_they_print(tmp_path):
    (tmp_path / "page.md").write_text(
        "<!-- not run: why -->\n```console\n$ false\n```\n\n"
        "```console\n$ echo 'one\ntwo'\none\ntwo\n$ echo three\nfour\n```\n"
    )
    (block,) = blocks_of(tmp_path / "page.md")
    assert [(command.text, command.shown) for command in block.commands] == [
        ("echo 'one\ntwo'", "one\ntwo\n"),
        ("echo three", "four\n"),
    ]
    (fault,) = faults_of(tmp_path / "page.md", tmp_path)
    assert fault == "$ echo three\nended with 0, 0 of 1 words are there:\nthree\n"


def test_a_page_that_fails_is_a_fault(tmp_path):
    (tmp_path / "page.md").write_text("```python\nraise ValueError(1)\n```\n```console\n$ exit 3\n$ true\n```\n")
    first, second = faults_of(tmp_path / "page.md", tmp_path)
    assert "ValueError: 1" in first
    assert second == "the session ended before $ exit 3"


# -- what is run -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_programs_of_the_tutorial_run_and_its_job_is_one(tmp_path):
    """The three programs run, and the job is valid: the quick part of the test below."""
    from plimsoll.records.job import Job

    programs = [block.text for block in blocks_of(ROOT / "docs" / "tutorial.md") if block.language == "python"]
    corpus, plain, own_loop = (program_done(program, tmp_path) for program in programs)
    assert (corpus.returncode, plain.returncode, own_loop.returncode) == (0, 0, 0), own_loop.stderr
    assert "DefaultCPUAllocator: can't allocate memory" in plain.stdout
    assert [line.split()[0] for line in own_loop.stdout.splitlines()] == ["1", "2", "3"]
    (job,) = (block for block in blocks_of(ROOT / "docs" / "tutorial.md") if block.file)
    (tmp_path / str(job.file)).write_text(job.text, encoding="utf-8")
    assert Job.from_yaml(tmp_path / "job.yaml").batch_size == 32


SCRIPTS = ROOT / "docs" / "from-a-script.md"


def test_what_is_said_of_the_scripts_is_printed(tmp_path):
    assert list(faults_of(SCRIPTS, tmp_path)) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_jobs_in_place_of_the_scripts_train_inside_a_limit(tmp_path):
    for block in blocks_of(SCRIPTS):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    lines = [line for file in sorted((ROOT / "docs").glob("*.md")) for line in file.read_text("utf-8").splitlines()]
    (tmp_path / "corpus.txt").write_text("\n".join(lines), "utf-8")
    rows = (f'"{line.replace(chr(34), "")}",{"long" if len(line) > 60 else "short"}' for line in lines if line.strip())
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *rows]), "utf-8")
    draw = random.Random(0)  # different vectors: rows of missing words are drawn with their deviation
    words = sorted({*" ".join(lines).split()})
    vectors = (" ".join([word, *(f"{draw.gauss():.3f}" for _ in range(100))]) for word in words)
    (tmp_path / "glove.6B.100d.txt").write_text("\n".join(vectors), "utf-8")
    jobs = sorted(tmp_path.glob("*.yaml"))
    assert len(jobs) == 5
    for job in jobs:
        command = f"$ plimsoll train {job.name} --budget 600MiB --set steps=2 --out {job.stem}"
        ((_, code, printed),) = session_done(Block("console", command), tmp_path)
        assert code == 0, printed
        assert (tmp_path / job.stem / "model").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_is_as_it_says(tmp_path):
    assert list(faults_of(ROOT / "docs" / "tutorial.md", tmp_path)) == []
    assert (tmp_path / "a.html").is_file()


# -- what is generated -------------------------------------------------------------------------------------------------


def test_the_page_of_the_command_line_has_every_command_option_and_example():
    page = command_line.page(app)
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert headings == list(COMMANDS)
    assert "plimsoll data tokenize" in headings
    assert not [name for name in headings if "worker" in name]
    assert "plimsoll train --resume --out runs/a" in page
    assert page.count("| `--from-step STEP` | With --resume: the checkpoint to continue from. |") == 1
    for name, command in COMMANDS.items():
        section = page.split(f"## {name}\n")[1].split("\n## ")[0]
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
        assert all(f"`{option}" in section or f", {option}" in section for option in options)


def test_the_python_page_has_every_public_name_and_every_name_that_pages_import():
    homes = {"Plan": ("plimsoll.records.plan", "Plan")}
    program = "```python\nfrom plimsoll.data.samples.windows import Loader, slots as l\nfrom torch import nn\n```\n"
    indented = "    ```python\n    from plimsoll.records.plan import (\n    Plan,\n    A)\n    ```\n"
    page = python_api.page(homes, ["lightning"], [program, indented])
    marks = re.findall(r"^::: (.+)$", page, re.MULTILINE)
    assert marks == [
        "plimsoll.records.plan.Plan", "plimsoll.integrations.lightning", "plimsoll.data.samples.windows.Loader",
        "plimsoll.data.samples.windows.slots", "plimsoll.records.plan.A",
    ]  # fmt: skip
    assert "heading: plimsoll.Plan" in page


@pytest.mark.parametrize("folder", indexes.HEADS)
def test_an_index_has_every_page_of_its_folder(folder):
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \| (.+) \|$", indexes.index(folder, ROOT), re.MULTILINE)
    assert [row[1] for row in rows] == sorted(path.name for path in (ROOT / folder).glob("*.md"))
    assert all(len(about) > 3 for _, _, about in rows)


def test_every_folder_of_pages_has_an_index():
    paths = [path.relative_to(ROOT) for path in PAGES]
    folders = {path.parent.as_posix() for path in paths if path.parts[0] == "docs" and path.parent.name != "docs"}
    assert folders == {folder for folder in indexes.HEADS if folder.startswith("docs/")}


@pytest.mark.parametrize(
    ("markdown", "about"),
    [
        ("# heap: what is kept\n\nMore.", "what is kept"),
        ("# plan\n\nIt [finds](a.md) a | b. And more.", "It finds a \\| b."),
        ("# Only a name\n", "Only a name"),
        ("# a\n\n```\nprinted\n```\n\nSaid. More.", "Said."),
    ],
)
def test_what_a_page_is_about(markdown, about):
    assert indexes.about(markdown) == about


@pytest.mark.parametrize(
    ("page", "link", "fitted"),
    [
        ("docs/plan.md", "techniques/", "techniques/index.md"),
        ("docs/plan.md", "techniques", "techniques/index.md"),
        ("docs/plan.md", "predict.md#reading-the-answer", "predict.md#reading-the-answer"),
        ("docs/techniques/heap.md", "../../benchmarks/results", "../benchmarks/results/index.md"),
        ("docs/plan.md", "../README.md", "index.md"),
        ("docs/report.md", "pictures/report.png", "pictures/report.png"),
        ("docs/causes/leak.md", "../../src/plimsoll/errors.py", "../source/src/plimsoll/errors.py.md"),
        ("CHANGELOG.md", "docs/plan.md", "plan.md"),
        ("docs/plan.md", "../CHANGELOG.md", "changelog.md"),
        ("docs/plan.md", "https://pytorch.org", "https://pytorch.org"),
    ],
)
def test_links_are_fitted_to_the_site(page, link, fitted):
    assert links.fitted(f"a [b]({link}), `[c]({link})`", page, ROOT) == f"a [b]({fitted}), `[c]({link})`"


def test_a_link_to_nothing_is_an_error():
    with pytest.raises(FileNotFoundError, match=r"docs/none\.md"):
        links.fitted("[a](none.md)", "docs/plan.md", ROOT)


@pytest.mark.parametrize(
    ("html", "addresses"),
    [
        ('<script src="https://cdn.org/a.js"></script>', ["https://cdn.org/a.js"]),
        ('<link rel="stylesheet" href="//fonts.org/a.css">', ["//fonts.org/a.css"]),
        ('<link rel="preconnect" href="https://fonts.org">', ["https://fonts.org"]),
        ("<style>a { background: url('https://a.org/b.png') }</style>", ["https://a.org/b.png"]),
        ('<img src="https://a.org/b.png">', ["https://a.org/b.png"]),
        ('<a href="https://a.org">a</a><link rel="canonical" href="https://a.org"><img src="b.png">', []),
    ],
)
def test_what_a_page_would_fetch_is_found(html, addresses):
    assert outward.fetched(html) == addresses
