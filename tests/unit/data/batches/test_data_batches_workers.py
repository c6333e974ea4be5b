"""Workers that die of any cause: the event names it, each sample comes once, and no process is left behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plimsoll.data.batches import workers as workers_module
from plimsoll.data.batches.batching import Buckets
from plimsoll.data.batches.loader import Loader
from plimsoll.errors import KilledError, PlimsollWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores.
    # torch looks for free file descriptors when a worker dies, and its signal handler may raise meanwhile.
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning"),
]

FOLDER = Path(__file__).parent
sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

import data_loader  # noqa: E402

BUCKETS = Buckets(max_tokens=300, pool_samples=100)


class Numbers:
    """Samples that equal their numbers. Each batch calls ``before`` in the process that reads it."""

    def __init__(self, num_samples: int = 300, before: Callable[[NDArray[np.int64]], None] = lambda ids: None) -> None:
        self._num_samples, self._before = num_samples, before

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        self._before(ids)
        return {"ids": torch.from_numpy(ids.copy()), "reader": torch.tensor(os.getpid())}

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids % 40 + 1


_OTHERS: set[BaseProcess] = set()


@pytest.fixture(autouse=True)
def _children_of_other_tests() -> None:
    _OTHERS.clear()
    _OTHERS.update(active_children())


def children() -> list[BaseProcess]:
    """Return the processes that a test has started."""
    return [child for child in active_children() if child not in _OTHERS]


@pytest.fixture
def loader_of() -> Iterator[Callable[..., Loader]]:
    """Return a function that makes loaders, and close them after the test."""
    loaders = []

    def make(*args, **options) -> Loader:
        loaders.append(Loader(*args, **options))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def ids_of(loader: Loader, num_batches: int) -> list[list[int]]:
    got = []
    for _ in range(num_batches):
        got.append(loader.peek().fields["ids"].tolist())
        loader.advance()
    return got


def kill_one(number: int = signal.SIGKILL) -> None:
    worker = children()[-1]
    os.kill(worker.pid, number)
    worker.join()


def in_worker() -> bool:
    return parent_process() is not None


EXPECTED = ids_of(Loader(Numbers(), BUCKETS, 1), 60)


changes_of_who_reads = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=3
)


@given(changes=changes_of_who_reads)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_sequence_is_the_same_whoever_reads_it(changes: list[tuple[int, int, int, int]]):
    state, got = Loader(Numbers(), BUCKETS, 1).state_dict(), []
    for num_workers, prefetch, world_size, num_batches in changes:
        options = {"workers": num_workers, "prefetch": prefetch, "world_size": world_size}
        ranks = [Loader(Numbers(), BUCKETS, 1, rank=rank, **options) for rank in range(world_size)]
        for rank in ranks:
            rank.load_state_dict(state)
        for _ in range(num_batches):
            ids = np.empty(len(EXPECTED[len(got)]), np.int64)
            for number, rank in enumerate(ranks):
                ids[number::world_size] = rank.peek().fields.get("ids", [])
                rank.advance()
            got.append(ids.tolist())
        state = ranks[-1].state_dict()
        for rank in ranks:
            rank.peek()  # simulates batches that are read ahead and lost
            rank.close()
    assert got == EXPECTED[: len(got)]


def test_workers_stay_over_the_epochs_and_read_everything(loader_of):
    loader = loader_of(Numbers(), BUCKETS, 1, workers=2)
    first, num_batches = set(), len(loader)
    assert num_batches * 2 < len(EXPECTED)
    got = []
    for _ in range(num_batches * 2):
        fields = loader.peek().fields
        got.append(fields["ids"].tolist())
        first.add(fields["reader"].item())
        loader.advance()
    assert got == EXPECTED[: len(got)]
    assert len(first) == 3  # the first batch starts one worker, and its size determines how many more may start
    assert os.getpid() not in first


def test_an_undone_step_gets_the_same_batch_and_a_moved_cursor_another(loader_of):
    loader = loader_of(Numbers(), BUCKETS, 1, workers=2)
    begin = loader.state_dict()
    assert ids_of(loader, 4) == EXPECTED[:4]
    assert loader.peek().fields["ids"].tolist() == loader.peek().fields["ids"].tolist() == EXPECTED[4]
    loader.load_state_dict(begin)
    assert ids_of(loader, 3) == EXPECTED[:3]


def test_reading_ahead_takes_no_random_number_from_the_training(loader_of):
    torch.manual_seed(3)
    expected = torch.rand(3).tolist()
    torch.manual_seed(3)
    ids_of(loader_of(Numbers(), BUCKETS, 1, workers=2), 5)
    assert torch.rand(3).tolist() == expected


def test_killed_workers_lose_and_repeat_nothing(loader_of):
    said: list[str] = []
    loader = loader_of(Numbers(), BUCKETS, 1, workers=4, on_event=said.append)
    got = []
    for number in range(30):
        got += ids_of(loader, 1)
        if number in (3, 10, 20):
            kill_one()  # the worker dies while this process is in its step, where nothing can raise
    assert got == EXPECTED[:30]
    assert [text.partition(" failed")[0] for text in said] == [
        "reading with 4 workers", "reading with 2 workers", "reading with 1 worker",
    ]  # fmt: skip
    assert "was killed (SIGKILL), by the kernel for lack of memory or by a user. Continuing at the same" in said[0]
    assert "with no workers: no sample is lost or repeated" in said[2]
    assert not children()


def test_a_worker_killed_while_it_is_waited_for_is_noticed_at_once(loader_of):
    def slow(ids: NDArray[np.int64]) -> None:
        if in_worker():
            if 3 in ids:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)

    said: list[str] = []
    loader = loader_of(Numbers(before=slow), BUCKETS, 1, workers=2, on_event=said.append)
    assert ids_of(loader, 30) == EXPECTED[:30]
    assert len(said) == 2
    assert "SIGKILL" in said[0]


@pytest.mark.parametrize(
    ("kills", "cause"),
    [
        ([4, 4], "was killed (SIGKILL), not by the kernel for"),
        ([4, 5], "was killed (SIGKILL), by the kernel for lack of"),
    ],
)
def test_a_kill_for_lack_of_memory_is_told_from_others(loader_of, kills: list[int], cause: str):
    said: list[str] = []
    now = [kills[0]]
    loader = loader_of(Numbers(), BUCKETS, 1, workers=2, on_event=said.append, oom_kills=lambda: now[0])
    ids_of(loader, 2)
    kill_one()
    now[0] = kills[1]
    assert ids_of(loader, 3) == EXPECTED[2:5]
    assert cause in said[0]


def test_a_worker_that_is_killed_with_a_lock_in_its_hands_holds_up_nobody(loader_of):
    """A worker that is killed while it holds a lock blocks no other process.

    A worker takes the lock of the shutdown event each time it checks the event.
    """
    said: list[str] = []
    loader = loader_of(Numbers(), BUCKETS, 1, workers=2, on_event=said.append)
    ids_of(loader, 2)
    loader._feed._ahead._iterator._workers_done_event._cond.acquire()  # acquired as if by the worker
    kill_one()
    assert ids_of(loader, 10) == EXPECTED[2:12]
    assert len(said) == 1


def test_without_a_listener_it_is_a_warning(loader_of):
    loader = loader_of(Numbers(), BUCKETS, 1, workers=2)
    ids_of(loader, 2)
    kill_one()
    with pytest.warns(PlimsollWarning, match="reading with 2 workers failed"):
        ids_of(loader, 10)


def test_an_error_that_is_there_without_workers_too_is_raised_as_it_is(loader_of):
    def fail(ids: NDArray[np.int64]) -> None:
        if 5 in ids:
            raise OSError("the disk is on fire")

    said: list[str] = []
    loader = loader_of(Numbers(before=fail), 10, shuffle=False, workers=2, on_event=said.append)
    with pytest.raises(OSError, match="^the disk is on fire$"):
        ids_of(loader, 1)
    assert [text.partition("failed: ")[2].partition(".")[0] for text in said] == ["OSError: the disk is on fire"] * 2
    assert loader.state_dict().items() >= {"epoch": 0, "position": 0}.items()


def test_processes_that_cannot_be_forked_are_done_without(loader_of, monkeypatch):
    def refuse() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    said: list[str] = []
    loader = loader_of(Numbers(), BUCKETS, 1, workers=2, on_event=said.append)
    monkeypatch.setattr(os, "fork", refuse)
    assert ids_of(loader, 3) == EXPECTED[:3]
    assert [text.partition(".")[0] for text in said] == [
        f"reading with {asked} failed: [Errno 11] Resource temporarily unavailable"
        for asked in ("2 workers", "1 worker")
    ]


def test_a_mistake_of_the_data_set_is_raised_and_the_batch_can_be_asked_for_again(loader_of, tmp_path: Path):
    def fail_once(ids: NDArray[np.int64]) -> None:
        if 25 in ids and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise KeyError("no such column")

    loader = loader_of(Numbers(before=fail_once), 10, shuffle=False, workers=2)
    assert ids_of(loader, 2) == [list(range(10)), list(range(10, 20))]
    with pytest.raises(KeyError, match="no such column"):
        loader.peek()
    assert ids_of(loader, 2) == [list(range(20, 30)), list(range(30, 40))]


def test_what_crashes_the_last_worker_is_not_read_here(loader_of, tmp_path: Path):
    path = tmp_path / "tokens.bin"
    np.zeros(1 << 20, np.uint8).tofile(path)
    mapped = np.memmap(path, np.uint8, "r")

    class Mapped(Numbers):
        def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
            return {"ids": torch.from_numpy(ids + mapped[ids * 4096])}

    said: list[str] = []
    loader = loader_of(Mapped(256), 10, shuffle=False, workers=2, on_event=said.append)
    assert ids_of(loader, 1) == [list(range(10))]
    os.truncate(path, 4096)  # a read past the end causes a bus error
    with pytest.raises(
        KilledError, match=r"crashed: worker \d+ died of SIGBUS \(/dev/shm has .* check that no"
    ) as error:
        ids_of(loader, 20)
    assert error.value.exit_code == 128 + signal.SIGBUS
    assert "reading with 2 workers failed: worker" in said[0]


@pytest.mark.parametrize(
    ("free_batches", "num_workers", "prefetch"),
    [(8, 4, 2), (7, 4, 1), (4, 4, 1), (3, 3, 1), (1, 1, 1), (0, 0, 1)],
)
def test_shared_memory_that_will_not_do_is_noticed_before(
    loader_of, monkeypatch, free_batches: int, num_workers: int, prefetch: int
):
    batch_bytes = 10 * 8 + 8
    monkeypatch.setattr(workers_module, "shared_memory_free_bytes", lambda: free_batches * batch_bytes)
    said: list[str] = []
    loader = loader_of(Numbers(), 10, shuffle=False, workers=4, on_event=said.append)
    assert ids_of(loader, 3) == [list(range(start, start + 10)) for start in (0, 10, 20)]
    assert loader._feed.num_workers == num_workers
    assert len(children()) == num_workers
    assert loader._feed._prefetch == prefetch
    assert len(said) == (free_batches < 8)
    if said:
        assert "4 workers that read 2 batches ahead need 704 B of it (88 B a batch): continuing with" in said[0]


IN_SMALL_SHARED_MEMORY = """
import numpy, torch, warnings
from plimsoll.data.batches.loader import Loader
warnings.simplefilter("ignore", UserWarning)
class Growing:
    def __len__(self): return 64
    def batch(self, ids, epoch=0):
        num_floats = 1 << 18 if ids[0] < 16 else 1 << 21
        return {"ids": torch.from_numpy(ids.copy()), "large": torch.ones(num_floats)}
got, said = [], []
for fields in Loader(Growing(), 4, shuffle=False, workers=4, on_event=said.append):
    got += fields["ids"].tolist()
assert got == list(range(64))
print("|".join(said))
"""


@pytest.mark.long
def test_shared_memory_that_overflows_later_is_survived():
    in_a_small_one = "mount -t tmpfs -o size=6m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", in_a_small_one], capture_output=True, check=False).returncode:
        pytest.skip("a /dev/shm of another size can be mounted by root only")
    command = f'{in_a_small_one} && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, sys.executable, IN_SMALL_SHARED_MEMORY],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, *later = done.stdout.strip().split("|")
    assert "need 8.0 MiB of it (1.0 MiB a batch): continuing with 4 workers that read 1 ahead" in before
    assert later
    assert all("No space left on device (28) (/dev/shm has" in text for text in later)


def test_workers_are_as_many_as_cores_and_budget_allow(loader_of, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert loader_of(Numbers(), 10, workers="auto")._feed.num_workers == 7
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert loader_of(Numbers(), 10, workers="auto")._feed.num_workers == 1
    mapped = Numbers()
    mapped.reads_fast = True
    assert loader_of(mapped, 10, workers="auto")._feed.num_workers == 0
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    loader = loader_of(Numbers(), 10, shuffle=False, workers="auto", host_budget_bytes=26 << 20)
    ids_of(loader, 1)
    assert loader._feed.num_workers == len(children()) == 2


def test_workers_run_one_thread_and_no_parallel_tokenizer(loader_of):
    class Threads(Numbers):
        def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
            is_off = os.environ.get("TOKENIZERS_PARALLELISM") == "false"
            return {"threads": torch.tensor(torch.get_num_threads()), "is_off": torch.tensor(is_off)}

    fields = loader_of(Threads(), 10, workers=1).peek().fields
    assert fields["threads"] == 1
    assert fields["is_off"]


MEMORY_OVER_AN_EPOCH = """
import sys, warnings
import numpy as np, psutil, torch
from plimsoll.data.batches.batching import Buckets
from plimsoll.data.batches.loader import Loader
warnings.simplefilter("ignore")

class Texts:
    def __init__(self): self.tokens = np.random.default_rng(0).integers(1, 60, 200_000).astype(np.uint16)
    def __len__(self): return len(self.tokens)
    def lengths(self, ids): return self.tokens[ids]
    def batch(self, ids, epoch=0): return {"ids": torch.zeros(len(ids), int(self.tokens[ids].max()), dtype=torch.int64)}

def private_bytes(process):
    text = open(f"/proc/{process.pid}/status").read()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024

loader = Loader(Texts(), Buckets(max_tokens=8192), workers=int(sys.argv[1]))
num_batches = len(loader)
for number, fields in enumerate(loader):
    if number in (num_batches // 10, num_batches - 2):
        me = psutil.Process()
        print(*map(private_bytes, sorted([me, *me.children()], key=lambda process: process.pid)))
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_does_not_grow_over_an_epoch(num_workers: int):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_OVER_AN_EPOCH, str(num_workers)], capture_output=True, text=True, check=True
    )
    early, late = (np.array(line.split(), int) for line in done.stdout.splitlines())
    assert len(early) == num_workers + 1
    assert ((late - early) < 4 << 20).all(), (early, late)


ENDLESS = f"""
import os, signal, sys, time, warnings
sys.path.insert(0, {str(FOLDER)!r})
warnings.simplefilter("ignore")
from test_data_batches_workers import BUCKETS, Numbers
from plimsoll.data.batches.loader import Loader
loader = Loader(Numbers(before=lambda ids: time.sleep(0.002)), BUCKETS, workers=2)
number = 0
while True:
    for fields in loader:
        number += 1
        if number == 5:
            print(*(child.pid for child in __import__("multiprocessing").active_children()), flush=True)
        if number == 10 and sys.argv[1] == "exit":
            sys.stdin.readline()  # until the workers have been looked at
            sys.exit()
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", ["exit", "SIGINT", "SIGTERM", "SIGKILL"])
def test_no_worker_outlives_the_training(end: str):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    if end == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    elif end != "exit":
        process.send_signal(getattr(signal, end))
    _, errors = process.communicate("\n", timeout=120)
    assert process.returncode == {"exit": 0, "SIGINT": -2, "SIGTERM": -15, "SIGKILL": -9}[end], errors
    _, alive = psutil.wait_procs(workers, timeout=120)  # torch's workers check for their parent every 5 s
    assert not alive


@pytest.mark.parametrize("num_kills", [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_kills_of_workers_and_of_the_training_lose_and_repeat_nothing(num_kills: int):
    result = data_loader.kills(num_kills)
    assert result["training"] + result["worker"] == num_kills
    assert result["wrong"] == 0
