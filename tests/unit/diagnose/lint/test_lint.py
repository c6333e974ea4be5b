"""Contracts of all modules in the folder of lint rules."""

import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.diagnose.lint import every_rule
from plimsoll.diagnose.lint.helpers.source import Source, parse
from processes import environment

NAMED_BY_THE_LABELS = {
    "loss_graph_kept", "missing_no_grad_eval", "zero_grad_inside_accumulation", "accumulation_not_normalised",
    "accumulation_same_batch", "last_partial_accumulation_dropped", "half_model_with_gradscaler",
    "readlines_whole_file", "pad_to_max_length", "dataparallel_used", "retain_graph_true_unneeded",
    "empty_cache_in_loop", "predictions_kept_on_gpu", "torch_load_without_map_location_or_mmap", "full_embedding_load",
    "hidden_state_not_detached", "dataset_moves_to_cuda_in_getitem", "dataloader_workers_list_of_objects",
    "deprecated_cuda_amp", "optimizer_state_kept_on_gpu_after_resume",
}  # fmt: skip
STRANGE = {
    "empty": "",
    "a-comment": "# torch\n",
    "names-that-are-not-there": "del a.b[0]\nx.y.z()\n(lambda: 0)()\n[i for i in j][0].k(*l, **m)\n",
    "deep": "x" + ".y" * 500 + "\n" + "a = " + "(" * 60 + "1" + ")" * 60 + "\n",
    "bound-to-itself": "loss = loss\nout = out + out\nfor a in a:\n    a = a(a)\n    loss.backward()\n    t += loss\n",
    "functions-that-call-each-other": "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\n"
    "for b in loader:\n    loss = f(b)\n    loss.backward()\n    total += loss\n",
    "match-and-async": "async def f():\n    async for b in loader:\n        match b:\n            case {'x': x}:\n"
    "                await model(x)\n",
    "starred": "for i, *rest in loader:\n    a, *b = model(*rest)\n    b.append(a)\n    (c := a).backward()\n",
}


def test_the_labelled_rules_are_there():
    assert set(every_rule()) >= NAMED_BY_THE_LABELS


@pytest.mark.parametrize("rule", every_rule())
@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE)
def test_strange_code_is_read(rule, text):
    assert isinstance(list(every_rule()[rule](parse(text))), list)


@pytest.mark.parametrize("rule", every_rule())
def test_the_package_itself_is_clean(rule, package):
    assert [hit.node.lineno for source in package for hit in every_rule()[rule](source)] == []


@pytest.fixture(scope="module")
def package() -> list[Source]:
    """Return every tenth file of this package, which is enough to see that no rule reports everything."""
    files = sorted((Path(__file__).parents[4] / "src/plimsoll").rglob("*.py"))[::10]
    return [parse(file.read_text("utf-8")) for file in files]


def test_rules_need_no_torch():
    code = (
        "import sys; from plimsoll.diagnose.lint import every_rule; every_rule();"
        "import plimsoll.diagnose.check_code; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0
