"""The values that a name may refer to."""

import pytest

from plimsoll.diagnose.lint.helpers.source import last_name, parse
from plimsoll.diagnose.lint.helpers.values import Value, value_of

LOSS, OUTPUT = Value("loss"), Value("output")


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("loss = criterion(model(x), y)\nlook(loss)", LOSS),
        ("loss = model(**batch).loss\nlook(loss)", LOSS),
        ("loss, logits = model(**batch)[:2]\nlook(loss)", LOSS),
        ("outputs = model(x)\nlook(outputs.logits[:, -1])", OUTPUT),
        ("out = torch.softmax(model(x), -1)\nlook(out)", OUTPUT),
        ("out = model(x).view(-1)\nlook(out * 2 + 1)", OUTPUT),
        ("_, best = torch.max(model(x), 1)\nlook(best)", Value("output", has_graph=False)),
        ("best = model(x).argmax(-1)\nlook(best)", Value("output", has_graph=False)),
        ("out = model(x).detach()\nlook(out)", Value("output", has_graph=False)),
        ("out = model(x).detach().cpu()\nlook(out)", Value("output", has_graph=False, is_on_device=False)),
        ("out = model(x).to('cpu')\nlook(out)", Value("output", is_on_device=False)),
        ("loss = criterion(model(x), y)\nloss = loss.item()\nlook(loss)", None),
        ("loss = criterion(model(x), y)\nlook(float(loss))", None),
        ("loss = criterion(model(x), y)\nlook(loss.shape)", None),
        ("loss = criterion(model(x), y)\nloss /= 4\nlook(loss)", LOSS),
        ("loss = np.mean(model(x))\nlook(loss)", None),
        ("look(unknown)", None),
        ("def f(x):\n    return model(x), 3\na, b = f(x)\nlook(a)", OUTPUT),
        ("def f(x):\n    return model(x), 3\na, b = f(x)\nlook(b)", None),
        ("def f(x):\n    with torch.no_grad():\n        return model(x)\nlook(f(x))", Value("output", has_graph=False)),
        ("def f(x):\n    return f(x)\nlook(f(x))", None),
    ],
)
def test_values_are_followed(code, value):
    source = parse(code)
    look = next(call for call in source.calls if last_name(call.func) == "look")
    assert value_of(source, look.args[0]) == value
