"""The limit on private memory, tested in separate processes that are watched from outside.

Each program prints one JSON object. The real behavior of `RLIMIT_DATA` is the subject, so nothing is mocked.
"""

import json
import subprocess
import sys
import time

import pytest

from plimsoll.device import process

MIB = 1 << 20

_HEAD = """
import json, mmap, os, resource, subprocess, sys, threading
from plimsoll.device import process
from plimsoll.device.cpu import data_limit
MIB = 1 << 20
def soft(): return resource.getrlimit(resource.RLIMIT_DATA)[0]
def answer(**fields): print(json.dumps(fields))
"""

_TORCH_HEAD = (
    _HEAD
    + """
import torch
from plimsoll.device.cpu.backend import CpuBackend
backend = CpuBackend()
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # imports torch._dynamo, some 100 MiB
torch.ones(512, 512) @ torch.ones(512, 512)
base = process.private_bytes()
"""
)


def _run(program, *arguments):
    """Run a program. Return its answer, and its peak private memory in bytes as seen from outside."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        highest_bytes = 0
        while child.poll() is None:
            try:
                highest_bytes = max(highest_bytes, process.private_bytes(child.pid))
            except OSError:
                break
            time.sleep(0.001)
        output, errors = child.communicate()
    assert child.returncode == 0, errors
    return json.loads(output), highest_bytes


_TRAIN = (
    _TORCH_HEAD
    + """
budget = base + int(sys.argv[1]) * MIB

def step(model, optimizer, size):
    hidden = torch.randn(size, 64, 128)
    loss = model(hidden).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def train():
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    families, used, released, size, done = [], [], [], 1024, 0
    while done < 4:
        family = None
        try:
            step(model, optimizer, size)
        except (RuntimeError, MemoryError) as error:
            family = backend.oom_family(error) or repr(error)
        if family is None:
            done += 1
            backend.use()
            continue
        families.append(family)
        optimizer.zero_grad()
        used.append(process.private_bytes())
        backend.release()
        released.append(process.private_bytes())
        size //= 2
    return dict(families=families, size=size, used=used, released=released)

with backend.limited(budget):
    result = train()
answer(budget=budget, peak=backend.use().peak_bytes, soft_after=soft(), **result)
"""
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("free_mib", [64, 120, pytest.param(400, marks=pytest.mark.slow)])
def test_training_past_the_limit_raises_is_undone_and_goes_on_under_it(free_mib):
    result, highest_bytes = _run(_TRAIN, free_mib)
    assert result["families"]
    assert set(result["families"]) <= {"cpu-allocator", "bad-alloc", "memory-error", "onednn"}
    assert result["size"] >= 1
    assert highest_bytes <= result["budget"]
    assert result["peak"] <= result["budget"]
    assert max(result["released"]) < result["budget"] - free_mib * MIB // 3
    assert all(after <= before for before, after in zip(result["used"], result["released"], strict=True))
    assert result["soft_after"] == -1


_FEED = (
    _TORCH_HEAD
    + """
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 800
    def __getitem__(self, index): return torch.full((1000,), index)

class Greedy(Numbers):
    def __getitem__(self, index): return torch.empty(data_limit.WORKER_ALLOWANCE_BYTES, dtype=torch.uint8)

def loader(dataset):
    return torch.utils.data.DataLoader(
        dataset, batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )

def total():
    return sum(int(batch[:, 0].sum()) for batch in loader(Numbers()))

with backend.limited(base + 96 * MIB):  # a thread takes 8 MiB of it for its stack, and each loader starts two
    first = total()
    in_thread = []
    thread = threading.Thread(target=lambda: in_thread.append(total()))
    thread.start()
    thread.join()
    try:
        next(iter(loader(Greedy())))
        family = None
    except RuntimeError as error:
        family = backend.oom_family(error)
answer(first=first, in_thread=in_thread, family=family)
"""
)


@pytest.mark.long
def test_forked_workers_have_room_of_their_own_and_a_greedy_one_reports_it():
    result, _ = _run(_FEED)
    assert result == {"first": 799 * 400, "in_thread": [799 * 400], "family": "cpu-allocator"}


_UNTOUCHED = (
    _HEAD
    + """
block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
with data_limit.limited(process.private_bytes() + 256 * MIB):
    before = soft()
    data_limit.follow(process.private_memory())
    unchanged = soft()
    for page in range(0, 64 * MIB, 4096):
        block[page] = 1
    data_limit.follow(process.private_memory())
    answer(before=before, unchanged=unchanged, after=soft())
"""
)


def test_the_limit_is_lowered_when_untouched_pages_are_touched():
    result, _ = _run(_UNTOUCHED)
    assert abs(result["before"] - result["unchanged"]) <= 2 * MIB
    assert abs(result["before"] - result["after"] - 64 * MIB) <= 2 * MIB


_NESTED = (
    _HEAD
    + """
base = process.private_bytes()
budgets, softs = [], []
def note():
    budgets.append((data_limit.budget_in_force_bytes() or base) - base)
    softs.append(soft())
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
note()
with data_limit.limited(base + 100 * MIB):
    note()
    with data_limit.limited(base + 50 * MIB):
        note()
        with data_limit.limited(base + 500 * MIB):
            note()
    note()
note()
answer(budgets=budgets, softs=softs, hard_kept=hard == resource.getrlimit(resource.RLIMIT_DATA)[1])
"""
)


def test_the_tighter_of_two_limits_holds_and_each_exit_puts_back_what_was():
    result, _ = _run(_NESTED)
    assert result["budgets"] == [0, 100 * MIB, 50 * MIB, 50 * MIB, 100 * MIB, 0]
    softs = result["softs"]
    assert softs[0] == softs[5] == -1
    assert softs[1] == softs[4]
    assert softs[3] <= softs[2] < softs[1]
    assert result["hard_kept"]


_CHILDREN = (
    _HEAD
    + """
resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, resource.RLIM_INFINITY))
with data_limit.limited(process.private_bytes() + 64 * MIB):
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        block = bytearray(300 * MIB)
        room = soft() - process.data_bytes()
        os.write(writer, json.dumps([room, data_limit.budget_in_force_bytes()]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    forked = json.loads(os.read(reader, 100))
    code = "import resource as r; r.setrlimit(r.RLIMIT_DATA, (1 << 33, -1)); b = bytearray(1 << 29); print(len(b))"
    executed = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    try:
        bytearray(80 * MIB)
        refused = False
    except MemoryError:
        refused = True
answer(forked=forked, executed=executed, refused=refused, soft_after=soft())
"""
)


def test_children_are_not_bound_by_the_limit_and_the_users_own_limit_comes_back():
    result, _ = _run(_CHILDREN)
    free_bytes, budget = result["forked"]
    assert 200 * MIB < free_bytes <= 220 * MIB  # the allowance of 512 MiB less the block of 300
    assert budget is None
    assert result["executed"] == 1 << 29
    assert result["refused"]
    assert result["soft_after"] == 3 << 30


_USED_ALREADY = (
    _HEAD
    + """
from plimsoll.errors import BudgetError
block = bytearray(b"x") * (100 * MIB)
try:
    with data_limit.limited(90 * MIB):
        message = "nothing raised"
except BudgetError as error:
    message = str(error)
answer(message=message, soft=soft())
"""
)


def test_a_budget_below_what_is_used_is_refused_with_both_numbers():
    result, _ = _run(_USED_ALREADY)
    assert result["message"].startswith("cannot limit this process to 90.0 MiB: it uses 1")
    assert "16.0 MiB are kept back; give more than 1" in result["message"]
    assert result["soft"] == -1


_MAKE_CODE = (
    _HEAD
    + """
def mapped(num_bytes, **more): return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, **more)
everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
kept, early = [], mapped(20 * MIB, prot=everything)
with data_limit.limited(process.private_bytes() + 60 * MIB):
    at_first = soft()
    early.close()
    data_limit.follow(process.private_memory())
    without_early = soft()
    early = mapped(20 * MIB, prot=everything)
    data_limit.follow(process.private_memory())
    again = soft()
    for _ in range(100):  # as oneDNN, of whose 256 KiB little more than a page is written
        kept.append(mapped(MIB // 4, prot=everything))
        kept[-1].write(b"x" * 4096)
        data_limit.follow(process.private_memory())
    with_code = soft()
    kept.append(mapped(16 * MIB))
    try:
        kept.append(mapped(48 * MIB))
        is_refused = False
    except OSError:
        is_refused = True
    del kept[:100]
    kept.append(mapped(2 * MIB))
    data_limit.follow(process.private_memory())
    after = soft()
answer(**{name: globals()[name] for name in ("at_first", "without_early", "again", "with_code", "after", "is_refused")})
"""
)


def test_code_that_is_made_in_a_limit_takes_nothing_of_it():
    said, _ = _run(_MAKE_CODE)
    assert 19 * MIB <= said["at_first"] - said["without_early"] <= 21 * MIB
    assert abs(said["again"] - said["at_first"]) <= MIB
    assert 23 * MIB <= said["with_code"] - said["at_first"] <= 25 * MIB  # of 25, looked at for each MiB, 0.4 touched
    assert said["is_refused"]
    assert said["after"] <= said["at_first"] + 2 * MIB


_RAISED = (
    _HEAD
    + """
budget = process.private_bytes() + 256 * MIB
with data_limit.limited(budget):
    first = soft()
    with data_limit.raised(8 * MIB):
        inside = soft()
        with data_limit.raised(4 * MIB):
            twice = soft()
        data_limit.follow(process.private_memory())  # another thread looks
        followed = soft()
    after = soft()
with data_limit.raised(8 * MIB):
    alone = soft()
answer(inside=inside - first, twice=twice - first, followed=followed - first, after=after - first, alone=alone)
"""
)


def test_the_limit_is_raised_for_a_while_and_stays_so_when_it_is_followed():
    answer, _ = _run(_RAISED)
    assert (answer["inside"], answer["twice"], answer["alone"]) == (8 * MIB, 12 * MIB, -1)
    assert answer["followed"] == pytest.approx(8 * MIB, abs=MIB)  # untouched pages may have been touched meanwhile
    assert answer["after"] == pytest.approx(0, abs=MIB)


_APART = (
    _HEAD
    + """
from plimsoll.device.cpu import heap
really, asked = heap._set, []
heap._set = lambda parameter, value: (asked.append(value), really(parameter, value))

def looked():
    before = heap.threshold_bytes()
    with data_limit.blocks_apart():
        inside = heap.threshold_bytes()
    return [before, inside, heap.threshold_bytes()]

found = [looked()]
num_asked = len(asked)
with data_limit.limited(process.private_bytes() + 512 * MIB):
    found.append(looked())
    heap.keep_freed()
    found.append(looked())
    with data_limit.blocks_apart():
        data_limit.tighten_heap()
    found.append(looked())
resource.setrlimit(resource.RLIMIT_DATA, (process.data_bytes() + 512 * MIB, -1))
found.append(looked())
answer(found=found, num_asked=num_asked)
"""
)


def test_blocks_apart_leave_the_threshold_before_behind_and_without_a_limit_nothing_is_touched():
    said, _ = _run(_APART)
    usual, fast, tight = 32 * MIB, 4 * MIB, MIB // 8
    assert said["num_asked"] == 0
    without, limited, kept, tightened, of_others = said["found"]
    assert without == [usual, usual, usual]
    assert (limited, kept, tightened) == ([fast, tight, fast], [None, tight, None], [tight, tight, tight])
    assert of_others == [usual, tight, usual]
