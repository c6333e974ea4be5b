"""The parsed parts of a source file."""

import ast

from plimsoll.diagnose.lint.helpers.source import (
    Edit,
    Given,
    Hit,
    Source,
    is_constant,
    keyword,
    last_name,
    names_bound,
    parse,
    path_of,
)

CODE = """\
import torch.nn as nn
import numpy
from torch.cuda.amp import autocast as cast
from . import sibling

def outer(x):
    y = nn.Linear(x, 1)
    y, (z, *w) = helper(y), x
    y += 1
    for a in b:
        while c:
            inner(y)
    return y

def helper(v):
    return v

class Net(nn.Module):
    def forward(self, x):
        return self.step(x)

    def step(self, x):
        return helper(x)
"""


def call(source: Source, name: str) -> ast.Call:
    return next(one for one in source.calls if last_name(one.func) == name)


def test_imported_names_are_written_out():
    source = parse(CODE)
    assert source.imports == {"nn": "torch.nn", "numpy": "numpy", "cast": "torch.cuda.amp.autocast"}
    assert source.dotted(call(source, "Linear").func) == "torch.nn.Linear"
    assert source.dotted(ast.parse("f().g", mode="eval").body) == ""


def test_loops_and_scopes_end_at_functions():
    source = parse(CODE)
    inner = call(source, "inner")
    assert [type(loop) for loop in source.loops(inner)] == [ast.While, ast.For]
    assert source.scope(inner).name == "outer"
    assert source.scope(source.functions["outer"][0]) is source.tree
    assert source.class_of(call(source, "step")).name == "Net"
    assert source.is_in_body(inner, source.functions["outer"][0].body)
    assert not source.is_in(inner, source.functions["helper"][0])


def test_what_a_name_is_given_is_in_order_and_has_its_place():
    source = parse(CODE)
    outer = source.functions["outer"][0]
    assert [(given.statement.lineno, given.place) for given in source.assignments(outer, "y")] == [
        (7, None),
        (8, 0),
        (9, None),
    ]
    assert [(given.statement.lineno, given.place) for given in source.assignments(outer, "w")] == [(8, 1)]
    assert source.assignments(outer, "x") == []
    assert isinstance(source.assignments(outer, "z")[0], Given)


def test_calls_find_functions_of_the_file_and_methods_of_their_class():
    source = parse(CODE)
    assert source.called(call(source, "step")).name == "step"
    assert source.called(call(source, "Linear")) is None
    assert len(source.callers(source.functions["helper"][0])) == 2
    assert source.callers(source.tree) == []


def test_places_count_characters_where_the_tree_counts_bytes():
    source = parse('é = "ü"; f(é)\n')
    found = source.calls[0]
    start, end = source.span(found)
    assert source.text[start:end] == source.written(found) == "f(é)"
    assert Hit(found, "", "").edits == ()
    assert Edit(start, end, "") == (9, 13, "")


def test_small_questions():
    made = parse("f(a.b.c, k=True)[0].d").calls[0]
    assert path_of(made.args[0]) == "a.b.c"
    assert path_of(made) == last_name(made) == ""
    assert is_constant(keyword(made, "k"), True)
    assert not is_constant(keyword(made, "k"), 1)
    assert keyword(made, "other") is None
    assert names_bound(ast.parse("a, [b, *c], d.e, f[0] = x").body[0].targets[0]) == ["a", "b", "c", "d.e"]
