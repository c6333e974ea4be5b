"""The prose of the package and of the pages keeps the rules of `prose_rules.py`, and every rule can be broken."""

import pytest

import prose_rules
from house_rules import Repository, Rule
from prose_rules import RULES, no_banned_phrases, sentences_are_short, summaries_are_imperatives
from test_house_rules import repository  # noqa: F401  a fixture

LONG = "Copy " + "very " * 24 + "long texts."


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Rule, repository: Repository):  # noqa: F811
    faults = list(rule(repository))
    assert not faults, "\n".join(["", *faults])


BROKEN = [
    (no_banned_phrases, "# Find what is left.\nx = 1", "a.py:1: comment: 'what': name the noun"),
    (no_banned_phrases, "x = 1  # as the job says", "a.py:1: comment: 'says': use specifies"),
    (no_banned_phrases, '"""A size and that\n of a file."""', "a.py:1: module: 'that of': name the noun"),
    (no_banned_phrases, "x = 'they go on with the next'", "a.py:1: string: 'go on': use continue"),
    (no_banned_phrases, "x = f'{y} has no room left'", "a.py:1: string: 'no room': use memory"),
    (no_banned_phrases, "def f():\n    '''Return those of a file.'''", "a.py:2: function: 'those of'"),
    (summaries_are_imperatives, "def f():\n    '''The size.'''", "'The size.': begin with a verb"),
    (summaries_are_imperatives, "async def f():\n    '''`None`, or a size.'''", "begin with a verb"),
    (summaries_are_imperatives, "class A:\n    '''What remains.'''", "'What remains.': begin with a noun"),
    (summaries_are_imperatives, "'''Whether it fits.'''", "'Whether it fits.': begin with a noun"),
    (sentences_are_short, f"def f():\n    '''{LONG}'''", "a.py:2: 27 words (at most 25): Copy very"),
    (sentences_are_short, f"# {LONG[:60]}\n# {LONG[60:]}", "a.py:1: 27 words"),
]


@pytest.mark.parametrize(("rule", "text", "fault"), BROKEN)
def test_a_broken_rule_is_found(rule: Rule, text: str, fault: str):
    assert fault in "\n".join(rule(Repository({"src/plimsoll/a.py": text})))


def test_a_phrase_on_a_page_is_found():
    pages = {"docs/a.md": "# A\n\nIt goes on\nwith `those of` it.\n", "docs/LOG.md": "one that\n"}
    assert list(no_banned_phrases(Repository(pages))) == ["docs/a.md:3: 'goes on': use continue"]


KEPT = '''"""The kinds of `what is there`, and `those of` "one that".

Args:
    first: the one.
    second: the other one, which has a text that is about as long as the first one.
    third: the last one, which has a text that is much longer than both.

    >>> x = "A long example is no sentence, however many words it has, and nobody has to make it any shorter"
"""

class A:
    """A record."""

    @property
    def size(self):
        """The size in bytes."""

def f():
    """Return whether it fits."""  # noqa: what it says
    return "what it says is up to the user"
'''


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_prose_that_keeps_the_rule_is_left_alone(rule: Rule):
    assert not list(rule(Repository({"src/plimsoll/a.py": KEPT})))


def test_the_faults_of_files_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "plimsoll").mkdir(parents=True)
    (tmp_path / "src" / "plimsoll" / "a.py").write_text("def f():\n    '''The size.'''\n", "utf-8")
    prose_rules.main(["src"])
    assert capsys.readouterr().out.split()[0] == "src/plimsoll/a.py:2:"
