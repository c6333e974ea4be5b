"""Checkpoints on a real disk: complete, torn, from another job, and half written by a killed process."""

import contextlib
import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.device.off_device import states_outside
from plimsoll.errors import CheckpointError
from plimsoll.training import checkpoint
from processes import run_program

MARKS = {"model": "gru", "seed": "0"}


def training(seed=0):
    """Return a model with a buffer, and AdamW after one step, so that it has states."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(root, step, keep=3, seed=0, marks=MARKS):
    model, optimizer = training(seed)
    return checkpoint.save(
        root,
        step,
        model=model,
        optimizer=optimizer,
        random_state=backend_for("cpu").random_state(),
        progress={"fingerprint": marks, "loader": {"epoch": 1, "position": 8}},
        keep=keep,
    )


def steps(root):
    return sorted(int(path.name[-8:]) for path in root.iterdir() if path.name.startswith("step-"))


def flat(state):
    """Yield the tensors and numbers of a nested state, in order."""
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in flat(value)]
    if isinstance(state, list | tuple):
        return [leaf for value in state for leaf in flat(value)]
    return [state.tolist() if isinstance(state, torch.Tensor) else state]


def test_everything_comes_back_to_the_bit(tmp_path):
    save(tmp_path, 7)
    model, optimizer = training()
    expected = flat(model.state_dict()), flat(optimizer.state_dict())
    other, other_optimizer = training(seed=1)
    assert (flat(other.state_dict()), flat(other_optimizer.state_dict())) != expected
    saved = checkpoint.load(tmp_path, MARKS)
    saved.restore(other, other_optimizer)
    assert (flat(other.state_dict()), flat(other_optimizer.state_dict())) == expected
    assert (saved.step, saved.progress["loader"]) == (7, {"epoch": 1, "position": 8})
    assert saved.num_bytes == sum(file.stat().st_size for file in (tmp_path / "step-00000007").iterdir())


def test_the_same_random_numbers_follow(tmp_path):
    def draws():
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    backend = backend_for("cpu")
    model, optimizer = training()
    fields = {"model": model, "optimizer": optimizer, "progress": {"fingerprint": MARKS}, "keep": 1}
    checkpoint.save(tmp_path, 1, random_state=backend.random_state(), **fields)
    expected = draws()
    backend.restore_random_state(checkpoint.load(tmp_path, MARKS).restore(model, optimizer))
    assert draws() == expected


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, 6])
def test_the_last_ones_are_kept(tmp_path, keep):
    """This also holds while there are fewer checkpoints than `keep`."""
    saved = []
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step, keep=keep)
        saved.append(step)
        assert steps(tmp_path) == saved[-keep:]


def test_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 10, seed=0)
    save(tmp_path, 10, seed=1)
    model, optimizer = training()
    checkpoint.load(tmp_path, MARKS).restore(model, optimizer)
    assert flat(model.state_dict()) == flat(training(seed=1)[0].state_dict())


def test_the_newest_is_opened_unless_a_step_is_named(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    assert checkpoint.load(tmp_path, MARKS).step == 20
    assert checkpoint.load(tmp_path, MARKS, step=10).step == 10
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 15 in .*: choose one of 10, 20"):
        checkpoint.load(tmp_path, MARKS, step=15)


def test_without_one_the_remedy_is_said(tmp_path):
    for root in (tmp_path, tmp_path / "not-there"):
        assert checkpoint.newest_good(root, MARKS) is None
        with pytest.raises(CheckpointError, match="there is no checkpoint in .*: give the command without --resume"):
            checkpoint.load(root, MARKS)


def test_later_ones_can_be_removed(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    checkpoint.remove_later(tmp_path, 10)
    assert steps(tmp_path) == [10]


def test_a_copy_that_somebody_made_is_left_alone(tmp_path):
    save(tmp_path, 10, keep=1)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000010.mine")
    (tmp_path / "step-notes").mkdir()
    save(tmp_path, 20, keep=1)
    assert checkpoint.load(tmp_path, MARKS).step == 20
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000010.mine", "step-notes", "step-00000020"}


FILES = ("model.pt", "optimizer.pt", "random.pt", "progress.json", "manifest.json")


def flip_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    os.truncate(file, file.stat().st_size - 1)


def remove(file):
    file.unlink()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_byte, truncate, remove])
def test_a_torn_checkpoint_is_refused_and_the_good_one_named(tmp_path, name, damage):
    save(tmp_path, 10)
    save(tmp_path, 20)
    damage(tmp_path / "step-00000020" / name)
    with pytest.raises(CheckpointError, match=r"step 20 .* is damaged .* step 10 is intact: .* --from-step 10"):
        checkpoint.load(tmp_path, MARKS)
    assert checkpoint.newest_good(tmp_path, MARKS).step == 10
    assert checkpoint.load(tmp_path, MARKS, step=10).step == 10


def test_in_place_of_a_torn_one_no_later_one_is_named(tmp_path):
    """A later checkpoint contains the steps that were to be repeated."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    remove(tmp_path / "step-00000010" / "model.pt")
    with pytest.raises(CheckpointError, match=r"step 10 .* is damaged .*start again with another --out"):
        checkpoint.load(tmp_path, MARKS, step=10)


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, False),
        ({"newer": 1}, False),  # a newer torch adds settings
        ({"lr": None}, False),  # and removes others
        ({"newer": 1, "lr": None}, True),
    ],
)
def test_the_states_of_another_optimizer_are_refused_by_its_settings(tmp_path, changes, is_refused):
    save(tmp_path, 10)
    model, optimizer = training()
    (group,) = optimizer.param_groups
    group.update({name: value for name, value in changes.items() if value is not None})
    for name in [name for name, value in changes.items() if value is None]:
        del group[name]
    saved = checkpoint.load(tmp_path, MARKS)
    if is_refused:
        with pytest.raises(CheckpointError, match="than AdamW, with lr in place of newer: go on under the budget"):
            saved.restore(model, optimizer)
    else:
        saved.restore(model, optimizer)


@pytest.mark.parametrize("are_outside", [False, True])
def test_who_counts_memory_may_look_while_each_file_is_mapped(tmp_path, are_outside):
    save(tmp_path, 10)
    model, optimizer = training(seed=1)
    expected = flat(training()[1].state_dict())
    looks = []
    with states_outside(optimizer, torch.clone) if are_outside else contextlib.nullcontext():
        checkpoint.load(tmp_path, MARKS).restore(
            model, optimizer, lambda: looks.append("optimizer.pt" in Path("/proc/self/maps").read_text())
        )
    assert looks == [False, are_outside]
    assert flat(optimizer.state_dict()) == expected


def test_a_flipped_byte_is_shown_in_numbers(tmp_path):
    save(tmp_path, 10)
    flip_byte(tmp_path / "step-00000010" / "model.pt")
    num_bytes = (tmp_path / "step-00000010" / "model.pt").stat().st_size
    expected = rf"is damaged \(model.pt has {num_bytes} bytes and CRC [0-9a-f]{{8}}, expected {num_bytes} and "
    with pytest.raises(CheckpointError, match=expected + r"[0-9a-f]{8}\); start again with another --out"):
        checkpoint.load(tmp_path, MARKS)


def test_a_checkpoint_of_another_job_is_refused_with_what_differs(tmp_path):
    save(tmp_path, 10)
    for marks, difference in [
        (MARKS | {"seed": "1"}, "seed was 0, is 1"),
        (MARKS | {"model.layers": "2"}, "model.layers was not set, is 2"),
        (MARKS | {"data": "a1"}, "the text, its labels or the tokenizer are others"),
        ({"model": "gru"}, "seed was 0, is not set"),
    ]:
        assert checkpoint.newest_good(tmp_path, marks) is None
        with pytest.raises(CheckpointError, match=rf"belongs to another job \({difference}\); start again"):
            checkpoint.load(tmp_path, marks)


# Pickling `Killer` ends a process while it writes the file that contains the object.
KILL = """
import os, signal, sys
from pathlib import Path
import torch
from plimsoll.training import checkpoint

class Killer:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

class Model(torch.nn.Linear):
    def get_extra_state(self):
        return Killer() if where == "model.pt" else None

def save(step):
    model = Model(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["extra"] = Killer() if where == "optimizer.pt" else None
    fields = {"random_state": Killer() if where == "random.pt" else None, "progress": {"fingerprint": {}}, "keep": 1}
    checkpoint.save(Path(sys.argv[1]), step, model=model, optimizer=optimizer, **fields)

for step, where in enumerate(("model.pt", "optimizer.pt", "random.pt"), start=11):
    if os.fork() == 0:
        save(step)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_kill_while_any_file_is_written_leaves_the_last_checkpoint_and_nothing_that_stays(tmp_path):
    save(tmp_path, 10, keep=1)
    assert run_program(KILL, tmp_path).stdout.split() == [str(-signal.SIGKILL)] * 3
    assert steps(tmp_path) == [10]
    assert checkpoint.load(tmp_path, MARKS).step == 10
    assert [path.name[:18] for path in tmp_path.glob(".*")] == [".step-00000013.tmp"]
    save(tmp_path, 30, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000030"]


FULL_DISK = """
import os, resource, sys
from pathlib import Path
import torch
from plimsoll.errors import OutputError
from plimsoll.training import checkpoint

def save(step):
    fields = {"random_state": torch.get_rng_state(), "progress": {"fingerprint": {}}, "keep": 1}
    checkpoint.save(Path(sys.argv[1]), step, model=model, optimizer=optimizer, **fields)

model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
save(10)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))  # as if the disk were full
num_open = len(os.listdir("/proc/self/fd"))
try:
    save(20)
except OutputError as error:
    print(error)
assert len(os.listdir("/proc/self/fd")) == num_open
"""


@pytest.mark.long
def test_a_full_disk_is_said_and_leaves_the_earlier_checkpoint(tmp_path):
    done = run_program(FULL_DISK, tmp_path)
    assert "cannot write the checkpoint of step 20" in done.stdout, done.stderr
    assert "File too large; earlier checkpoints are intact: free some space and continue with --resume" in done.stdout
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert checkpoint.load(tmp_path, {}).step == 10


MEMORY = """
import json, sys
from pathlib import Path
import torch
from plimsoll.device.base import backend_for
from plimsoll.training import checkpoint

backend, root = backend_for("cpu"), Path(sys.argv[1])
model = torch.nn.Linear(2048, 2048)  # 16 MiB, and as much for each of two states
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2048)).sum().backward()
optimizer.step()

def growth(work):
    backend.release()
    backend.reset_peak()
    before = backend.use().used_bytes
    work()
    return backend.use().peak_bytes - before

def save(step):
    fields = {"random_state": backend.random_state(), "progress": {"fingerprint": {}}, "keep": 1}
    checkpoint.save(root, step, model=model, optimizer=optimizer, **fields)

save(1)
print(json.dumps([growth(lambda: save(2)), growth(lambda: checkpoint.load(root, {}))]))
"""


def test_saving_and_checking_make_no_second_copy(tmp_path):
    while_saving_bytes, while_checking_bytes = json.loads(run_program(MEMORY, tmp_path).stdout)
    assert while_saving_bytes < 8 << 20
    assert while_checking_bytes < 4 << 20


# An audit hook sees "os.rename" before it happens. There the process is killed, or the rename is refused.
IN_THE_WINDOW = """
import os, signal, sys
from pathlib import Path
import torch
from plimsoll.errors import OutputError
from plimsoll.training import checkpoint

def watch(event, arguments):
    if event != "os.rename":
        return
    source, target = map(os.path.basename, arguments[:2])
    if target == "step-00000010" and armed.pop(source[:19], None):
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(5, "Input/output error")

armed = {".step-00000010.tmp-": True}
sys.addaudithook(watch)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fields = {"random_state": None, "progress": {"fingerprint": {}, "is_second": True}, "keep": 1}
try:
    checkpoint.save(Path(sys.argv[1]), 10, model=model, optimizer=optimizer, **fields)
except OutputError as error:
    print(error)
print(armed)
"""


def test_a_kill_while_a_step_is_saved_anew_leaves_the_old_one(tmp_path):
    save(tmp_path, 10, marks={})
    done = run_program(IN_THE_WINDOW, tmp_path, "kill")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert not (tmp_path / "step-00000010").exists()
    for saved in (
        checkpoint.newest_good(tmp_path, {}),
        checkpoint.load(tmp_path, {}),
        checkpoint.load(tmp_path, {}, 10),
    ):
        assert (saved.step, saved.progress["loader"]) == (10, {"epoch": 1, "position": 8})
        saved.restore(*training(seed=1))
    checkpoint.remove_later(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    save(tmp_path, 20, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


def test_a_failure_while_a_step_is_saved_anew_leaves_the_old_one(tmp_path):
    save(tmp_path, 10, marks={})
    done = run_program(IN_THE_WINDOW, tmp_path, "fail")
    assert "cannot write the checkpoint of step 10" in done.stdout, done.stderr
    assert done.stdout.endswith("{}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert checkpoint.load(tmp_path, {}).progress["loader"] == {"epoch": 1, "position": 8}


def test_what_was_aside_when_the_new_one_was_in_place_is_removed(tmp_path):
    save(tmp_path, 10, seed=0)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".step-00000010.old-7")
    save(tmp_path, 10, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


# Removing the second file ends the process.
KILL_IN_REMOVAL = """
import os, signal, sys
from pathlib import Path
from plimsoll.training import checkpoint

def watch(event, arguments):
    if event == "os.remove":
        removed.append(arguments[0])
        if len(removed) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

removed = []
sys.addaudithook(watch)
checkpoint.remove_later(Path(sys.argv[1]), 10)
"""


def test_a_kill_in_the_removal_leaves_no_half_of_one_under_a_good_name(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    assert run_program(KILL_IN_REMOVAL, tmp_path).returncode == -signal.SIGKILL
    assert steps(tmp_path) == [10]
    assert checkpoint.load(tmp_path, MARKS).step == 10
    (leftover,) = tmp_path.glob(".step-*")
    save(tmp_path, 20)
    leftover.mkdir()  # left by a process with the same id, as in another container
    leftover.rename(tmp_path / f".step-00000020.tmp-{os.getpid()}").joinpath("model.pt").touch()
    checkpoint.remove_later(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_what_was_just_saved_is_never_removed_for_later_steps(tmp_path):
    """Otherwise torn checkpoints of later steps would count as the newest and displace every new one."""
    for step in (90, 100, 10, 20):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [20, 100]
