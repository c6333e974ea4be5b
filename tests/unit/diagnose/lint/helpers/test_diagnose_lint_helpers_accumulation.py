"""The recognition of gradient accumulation."""

import ast

import pytest

from plimsoll.diagnose.lint.helpers.accumulation import accumulations, is_named_so, is_normalised
from plimsoll.diagnose.lint.helpers.source import parse

CONDITIONAL = """\
for i, batch in enumerate(loader):
    loss = model(batch)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
"""


def test_a_step_now_and_then_and_a_step_behind_a_loop():
    (found,) = accumulations(parse(CONDITIONAL))
    assert isinstance(found.condition, ast.If)
    source = parse("for b in loader:\n    for micro in b:\n        model(micro).backward()\n    optimizer.step()\n")
    (found,) = accumulations(source)
    assert found.condition is None
    assert is_named_so(source, found)


@pytest.mark.parametrize(
    "code",
    [
        "for b in loader:\n    model(b).backward()\n    optimizer.step()\n",
        CONDITIONAL.replace("if (i + 1) % 4 == 0:", "if math.isfinite(loss):"),
        "accelerator = Accelerator(gradient_accumulation_steps=4)\n"
        + CONDITIONAL.replace("loss.backward()", "accelerator.backward(loss)"),
        "for b in loader:\n    with accelerator.accumulate(model):\n        model(b).backward()\n"
        "        optimizer.step()\n",
        "for i, b in enumerate(loader):\n    d(b).backward()\n    optimizer_d.step()\n    if i % 5 == 0:\n"
        "        g(b).backward()\n        optimizer_g.step()\n",
    ],
    ids=["each-batch", "another-condition", "a-library", "managed", "turns"],
)
def test_what_is_none(code):
    assert accumulations(parse(code)) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("loss = model(batch)", False),
        ("loss = model(batch) / 4", True),
        ("loss = model(batch) * scale", True),
        ("loss = model(batch).div(4)", True),
        ("loss = model(batch); loss /= 4", True),
        ("loss = model(batch); scaled = loss / 4; loss = scaled", True),
        ("loss = nn.functional.cross_entropy(model(batch), y, reduction='sum')", True),
    ],
)
def test_what_divides_a_loss(line, expected):
    source = parse(CONDITIONAL.replace("loss = model(batch)", line))
    assert is_normalised(source, accumulations(source)[0]) == expected
