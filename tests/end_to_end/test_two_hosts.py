"""Two "hosts", which are network namespaces of this machine joined by a cable: one job, and the cable is cut.

They need the right to make namespaces (root) and iproute2; otherwise they are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from end_to_end.commands import environment, finish, steps_of, trained, wait_until, write_job
from plimsoll.records.run import EndLine, read_lines

ADDRESSES = ("10.213.7.1", "10.213.7.2")
TIMEOUT_SECONDS = 15
NUM_STEPS = 400

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Yield two namespaces that are joined by a pair of virtual network cards."""
    names = (f"plimsoll-a{os.getpid()}", f"plimsoll-b{os.getpid()}")
    cards = (f"pa{os.getpid()}"[:15], f"pb{os.getpid()}"[:15])
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cards[0], "type", "veth", "peer", "name", cards[1])
        for name, card, address in zip(names, cards, ADDRESSES, strict=True):
            ip("link", "set", card, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_on(host: str, number: int, *arguments: object, rendezvous: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start torchrun on one host with one rank; by default its agents know their ranks from the start."""
    static = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1")
    static += ("--master-addr", ADDRESSES[0], "--master-port", "29511")
    card = f"p{'ab'[number]}{os.getpid()}"[:15]
    return subprocess.Popen(
        [
            *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
            *(rendezvous or static),
            *("-m", "plimsoll", "train", *map(str, arguments), "--json"),
        ],
        env=environment(GLOO_SOCKET_IFNAME=card, PLIMSOLL_RANKS_TIMEOUT=str(TIMEOUT_SECONDS)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_cut_cable_is_a_clear_error_and_a_clean_resume(hosts: tuple[str, str], tmp_path: Path):
    job = write_job(tmp_path / "job.yaml", steps=NUM_STEPS)
    trained(job, "--out", tmp_path / "alone", "--set", "model.dropout=0")
    run = tmp_path / "run"
    both = [
        start_on(host, number, job, "--out", run, "--set", "model.dropout=0", "--set", "checkpoint.every=1")
        for number, host in enumerate(hosts)
    ]
    wait_until(lambda: len(steps_of(run)) >= 3, both[0])
    ip("-n", hosts[1], "link", "set", f"pb{os.getpid()}"[:15], "down")
    ends = [finish(one) for one in both]
    assert all(end.returncode != 0 for end in ends)
    num_done = len(steps_of(run))
    assert 3 <= num_done < NUM_STEPS
    told = "".join(end.stderr for end in ends)
    assert "lost another rank, which ended, or did not answer for 15 s" in told
    last = [*read_lines(run / "metrics.jsonl")][-1]
    assert isinstance(last, EndLine)
    assert last.status == "failed"

    ip("-n", hosts[1], "link", "set", f"pb{os.getpid()}"[:15], "up")
    both = [
        start_on(host, number, "--resume", "--out", run, "--set", f"steps={num_done + 5}")
        for number, host in enumerate(hosts)
    ]
    ends = [finish(one) for one in both]
    assert [end.returncode for end in ends] == [0, 0], "".join(end.stderr for end in ends)
    steps, of_one = steps_of(run), steps_of(tmp_path / "alone")
    assert [step.step for step in steps] == list(range(1, num_done + 6))
    for one, other in zip(steps, of_one, strict=False):
        assert (one.first_sample, one.num_samples) == (other.first_sample, other.num_samples)
        assert abs(one.loss - other.loss) < 1e-4  # after some hundred steps


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_on_one_host_makes_torchrun_begin_again_on_both(
    hosts: tuple[str, str], tmp_path: Path, number: int
):
    job = write_job(tmp_path / "job.yaml", steps=NUM_STEPS // 4)
    trained(job, "--out", tmp_path / "alone", "--set", "model.dropout=0")
    run = tmp_path / "run"
    changes = ("--set", "model.dropout=0", "--set", "checkpoint.every=1", "--force")
    both = [
        start_on(host, place, job, "--out", run, *changes, rendezvous=elastic(place))
        for place, host in enumerate(hosts)
    ]
    wait_until(lambda: len(steps_of(run)) >= 3, both[0])
    (victim,) = (
        child for child in psutil.Process(both[number].pid).children(recursive=True) if "RANK" in child.environ()
    )
    victim.kill()
    ends = [finish(one) for one in both]
    assert [end.returncode for end in ends] == [0, 0], "".join(end.stderr for end in ends)
    steps, of_one = steps_of(run), steps_of(tmp_path / "alone")
    assert [step.step for step in steps] == [step.step for step in of_one]
    for one, other in zip(steps, of_one, strict=True):
        assert (one.first_sample, one.num_samples) == (other.first_sample, other.num_samples)
        assert abs(one.loss - other.loss) < 1e-4


def elastic(number: int) -> tuple[str, ...]:
    """Return the arguments with which torchrun's agents can rendezvous repeatedly."""
    return (
        *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", ADDRESSES[number]),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29512"),
        *("--rdzv-conf", f"is_host={1 - number}"),
    )
