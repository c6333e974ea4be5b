"""`plimsoll.explained` around code that really runs out of memory, in a separate process."""

import io
import json
import textwrap

import pytest

import plimsoll
from processes import run_program

PROGRAM = """
import json, resource, sys, weakref
import torch
import plimsoll
from plimsoll.device import process
model = torch.nn.Linear(256, 4096)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outputs = []
told = plimsoll.explained(record=RECORD)
resource.setrlimit(resource.RLIMIT_DATA, (process.data_bytes() + (220 << 20),) * 2)

@told
def train():
    for step in range(200):
        batch = torch.randn(128, 256)
        output = model(batch)
        output.square().mean().backward()
        optimizer.step()
        outputs.append(output)

try:
    train()
except RuntimeError as error:
    assert "DefaultCPUAllocator" in str(error), error
    diagnosis = told.diagnosis
    print(diagnosis.to_json())
"""


@pytest.mark.parametrize("record", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_real_shortage_is_explained_and_goes_on(tmp_path, record):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.replace("RECORD", str(record)), encoding="utf-8")
    done = run_program(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    diagnosis = json.loads(done.stdout)
    first = diagnosis["findings"][0]
    assert first["cause"] == "graph_kept"
    assert first["title"] == "`outputs` collects tensors with their graphs"
    assert first["place"].endswith("train.py:19")
    assert first["effect_bytes"] > 60 << 20
    sizes = {share["category"]: share for share in diagnosis["shares"]}
    assert sizes["parameters"]["num_bytes"] == (256 + 1) * 4096 * 4
    assert sizes["kept by variables"]["num_bytes"] == pytest.approx(diagnosis["num_steps"] * (2 << 20), rel=0.05)
    assert "`outputs` collects tensors" in " ".join(done.stderr.split())


@pytest.mark.parametrize("error", [ValueError("CUDA out of memory"), KeyError(3), SystemExit(1), KeyboardInterrupt()])
def test_other_errors_pass_in_silence(error):
    file = io.StringIO()
    told = plimsoll.explained(file=file)
    with pytest.raises(type(error)) as raised, told:
        raise error
    assert raised.value is error
    assert (file.getvalue(), told.diagnosis) == ("", None)


def test_an_error_without_sizes_is_explained_too():
    file = io.StringIO()
    told = plimsoll.explained(file=file)
    with pytest.raises(MemoryError), told:
        raise MemoryError
    assert told.diagnosis.event.is_oom
    assert "Out of memory" in file.getvalue()


def test_nothing_is_left_behind():
    from torch.optim.optimizer import _global_optimizer_post_hooks

    before = len(_global_optimizer_post_hooks)
    with plimsoll.explained():
        assert len(_global_optimizer_post_hooks) == before + 1
    assert len(_global_optimizer_post_hooks) == before


def test_a_decorated_function_may_call_itself_and_is_told_of_once():
    from torch.optim.optimizer import _global_optimizer_post_hooks

    file = io.StringIO()
    before = len(_global_optimizer_post_hooks)

    @plimsoll.explained(file=file)
    def fail(depth: int) -> None:
        if depth:
            fail(depth - 1)
        raise MemoryError

    with pytest.raises(MemoryError):
        fail(1)
    assert len(_global_optimizer_post_hooks) == before
    assert file.getvalue().count("Out of memory") == 1


def test_what_was_refused_is_no_part_of_what_was_in_use(tmp_path):
    """One request exceeds every limit in a small training. The used bytes exclude it, and its line is named."""
    program = """
import torch, plimsoll
model = torch.nn.Linear(64, 64)
with plimsoll.limited("600MiB"), plimsoll.explained() as told:
    model(torch.randn(8, 64)).sum().backward()
    big = torch.empty(2**28)
"""
    path = tmp_path / "train.py"
    path.write_text(
        f"try:\n{textwrap.indent(program, '    ')}\nexcept RuntimeError:\n    print(told.diagnosis.to_json())"
    )
    done = run_program(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    diagnosis = json.loads(done.stdout)
    (finding,) = diagnosis["findings"]
    assert (finding["cause"], finding["place"].endswith("train.py:7")) == ("absurd_request", True)
    sizes = {share["category"]: share["num_bytes"] for share in diagnosis["shares"]}
    assert sizes.pop("asked for") == 1 << 30
    assert sum(sizes.values()) < 600 << 20
    assert sizes.get("temporaries", 0) < 1 << 20
    assert diagnosis["limit_bytes"] <= 600 << 20
