"""`plimsoll cache`: it lists the cache, and clears the named parts or all parts that are quick to compute again."""

import json

import pytest

from plimsoll.files import cached_answers


@pytest.fixture
def kept():
    """Write a plan and a prediction to the cache."""
    cached_answers.write("plans", {"job": 1}, b"a plan")
    cached_answers.write("predictions", {"job": 1}, b"a prediction")


def numbers(call, *arguments):
    code, out, err = call("cache", *arguments, "--json")
    assert (code, err) == (0, "")
    return {kind["name"]: kind["num_files"] for kind in json.loads(out)["kinds"]}


@pytest.mark.parametrize("arguments", [(), ("list",)])
def test_it_lists_what_there_is(call, kept, arguments):
    code, out, err = call("cache", *arguments)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["plans", "1"] in [line[:2] for line in lines]
    assert ["traces", "0", "0", "B"] in lines


def test_it_clears_what_is_named(call, kept):
    assert numbers(call, "clear", "plans") == {"plans": 1}
    found = numbers(call, "list")
    assert (found["plans"], found["predictions"]) == (0, 1)
    assert numbers(call, "clear")["predictions"] == 1
    assert numbers(call, "list")["predictions"] == 0


def test_an_unknown_kind_is_refused_before_anything_is_cleared(refused, call, kept):
    assert refused("cache", "clear", "plans", "plns") == (
        "error: the cache has no kind 'plns': give one of predictions, plans, baselines, traces, speeds, calibration, "
        "data, embeddings\n"
    )
    assert numbers(call, "list")["plans"] == 1
