"""`plimsoll train --nproc N` and torchrun: equal to one process, through kills, restarts and other numbers of ranks.

The reference is the same job in one process. Dropout is off, because each rank draws its own masks.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.ranks_started import free_port, start_ranks

from end_to_end.commands import (
    SMALL_JOB,
    assert_each_sample_once,
    environment,
    finish,
    learned,
    lines_of,
    plimsoll,
    start,
    steps_of,
    trained,
    wait_until,
    write_job,
)
from plimsoll.records.job import Job
from plimsoll.records.run import DeathLine, EvaluationLine, RunRecord, StartLine

TOLERANCE = 1e-5
MODEL = {**SMALL_JOB["model"], "dropout": 0.0}  # type: ignore[dict-item]
NUM_STEPS = 12


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    # 2, 3 and 4 ranks share 15 samples unevenly.
    return write_job(folder / "job.yaml", model=MODEL, batch_size=15, steps=NUM_STEPS, evaluate_every=6)


@pytest.fixture(scope="module")
def alone(job: Path) -> Path:
    """Return the run of a single process."""
    run = job.parent / "alone"
    trained(job, "--out", run)
    return run


def assert_same_training(run: Path, reference: Path) -> None:
    steps, of_one = steps_of(run), steps_of(reference)
    assert_each_sample_once(steps, NUM_STEPS)
    for one, other in zip(steps, of_one, strict=True):
        assert (one.first_sample, one.num_samples, one.num_units) == (
            other.first_sample,
            other.num_samples,
            other.num_units,
        )
        assert abs(one.loss - other.loss) < TOLERANCE
    evaluated = {line.step: line for line in evaluations_of(run)}  # also if a process of the run has ended in between
    for line in evaluations_of(reference):
        assert evaluated[line.step].num_samples == line.num_samples
        assert abs(evaluated[line.step].loss - line.loss) < TOLERANCE
    found, expected = learned(run), learned(reference)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=TOLERANCE, rtol=0, err_msg=name)


def evaluations_of(run: Path) -> list[EvaluationLine]:
    return [line for line in lines_of(run) if isinstance(line, EvaluationLine)]


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the training processes below a command, one per rank."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "RANK" in child.environ() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def kill_a_rank(process: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    """Kill one of the ranks with SIGKILL in the first half of the training."""
    num_steps = chance.randint(1, NUM_STEPS // 2)
    wait_until(lambda: len(steps_of(run)) >= num_steps, process)
    chance.choice(ranks_of(process)).kill()


@pytest.mark.long
def test_a_killed_rank_and_another_number_of_ranks_change_nothing(job: Path, alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    half = NUM_STEPS // 2
    arguments = (job, "--out", run, "--nproc", 2, "--set", f"steps={half}", "--set", "checkpoint.every=1", "--json")
    process = start("train", *arguments)
    wait_until(lambda: len(steps_of(run)) >= 1, process)
    victims = ranks_of(process)
    victims[-1].kill()
    done = finish(process)
    assert done.returncode == 0, done.stderr
    deaths = [line for line in lines_of(run) if isinstance(line, DeathLine)]
    assert [death.signal for death in deaths] == ["SIGKILL"]
    trained("--resume", "--out", run, "--nproc", 3, "--set", f"steps={NUM_STEPS}")
    assert_same_training(run, alone)
    record = RunRecord.from_directory(run)
    assert len(record.peak_bytes_of_ranks) == 3
    assert record.peak_bytes_of_ranks[0] <= max(record.peak_bytes_of_ranks) <= record.peak_bytes
    assert {len(step.peak_bytes_of_ranks) for step in record.finished_steps} == {2, 3}


def is_listened_at(port: int) -> bool:
    """Return whether a server listens at a port of this machine."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def torchrun(num_ranks: int, *arguments: object, script: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    command += ["--nproc-per-node", str(num_ranks)]
    command += ["-m", "plimsoll"] if script is None else ["--no-python", "bash", str(script)]
    command += ["train", *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_kills_of_a_random_rank_under_torchrun(job: Path, alone: Path, tmp_path: Path, seed: int):
    run, chance = tmp_path / "run", random.Random(seed)
    num_ranks = chance.randint(2, 4)
    process = torchrun(num_ranks, job, "--out", run, "--set", "checkpoint.every=1", "--json")
    kill_a_rank(process, run, chance)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert sum(isinstance(line, StartLine) for line in lines_of(run)) == 2
    assert [line.signal for line in lines_of(run) if isinstance(line, DeathLine)] == ["rank lost"]
    assert_same_training(run, alone)


@pytest.mark.slow
def test_a_rank_that_dies_before_it_begins_does_not_make_the_restart_begin_elsewhere(
    job: Path, alone: Path, tmp_path: Path
):
    """It resumes from the requested step, and not from the newest checkpoint of the earlier run."""
    run = tmp_path / "run"
    trained(job, "--out", run, "--set", "steps=8", "--set", "checkpoint.every=4")
    process = torchrun(2, "--resume", "--from-step", "4", "--out", run, "--set", f"steps={NUM_STEPS}")
    wait_until(lambda: len(ranks_of(process)) == 2, process)
    ranks_of(process)[-1].kill()
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert [line.step for line in lines_of(run) if isinstance(line, StartLine)][-1] == 4
    assert_same_training(run, alone)


@pytest.mark.long
@pytest.mark.parametrize("force", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_rank_under_torchrun_goes_on_where_it_was_killed(job: Path, alone: Path, tmp_path: Path, force: bool):
    """With `--force` an earlier run is removed first, but not the run that this torchrun has begun."""
    run = tmp_path / "run"
    if force:
        trained(job, "--out", run, "--set", "steps=1")
    forced = ["--force"] if force else []
    script = tmp_path / "train.sh"  # torchrun restarts it with the rank
    script.write_text(f'{sys.executable} -m plimsoll "$@"\nexit $?\n')
    process = torchrun(1, job, "--out", run, "--set", "checkpoint.every=1", *forced, script=script if force else None)
    wait_until(lambda: len(steps_of(run)) >= 3, process)
    ranks_of(process)[-1].kill()  # below its script
    done = finish(process)
    assert done.returncode == 0, done.stderr
    starts = [line for line in lines_of(run) if isinstance(line, StartLine)]
    assert [line.restarts for line in starts] == [0, 1]
    assert starts[1].step >= 2
    assert_same_training(run, alone)


def agent(port: int, nodes: str, *arguments: object) -> subprocess.Popen[str]:
    """Start one of the agents that several machines would have, with one rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"]
    command += ["--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    command += ["--rdzv-conf", "last_call_timeout=3"]
    command += ["-m", "plimsoll", "train", *map(str, arguments)]
    own = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # otherwise torch 2.13 leaves a late agent waiting
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_a_rank_or_an_agent_of_two_is_killed_and_all_go_on(job: Path, alone: Path, tmp_path: Path, victim: str):
    """Each agent counts its own restarts; an agent that replaces another one starts at zero."""
    run, port = tmp_path / "run", free_port()
    arguments = (job, "--out", run, "--set", "checkpoint.every=1", "--force")
    both = [agent(port, "2", *arguments)]
    wait_until(lambda: is_listened_at(port), both[0])
    both.append(agent(port, "2", *arguments))
    wait_until(lambda: len(steps_of(run)) >= 3, both[0])
    (rank,) = ranks_of(both[1])
    if victim == "agent":
        both[1].kill()
        rank.kill()
        both[1].communicate()
        both[1] = agent(port, "2", *arguments)
    else:
        rank.kill()
    ends = [finish(one) for one in both]
    assert [end.returncode for end in ends] == [0, 0], "".join(end.stderr for end in ends)
    assert_same_training(run, alone)


@pytest.mark.slow
def test_where_one_of_two_agents_is_left_it_goes_on_alone(job: Path, alone: Path, tmp_path: Path):
    run, port = tmp_path / "run", free_port()
    arguments = (job, "--out", run, "--set", "checkpoint.every=1")
    first = agent(port, "1:2", *arguments)
    wait_until(lambda: is_listened_at(port), first)
    second = agent(port, "1:2", *arguments)
    wait_until(lambda: len(steps_of(run)) >= 3, first)
    (rank,) = ranks_of(second)
    second.kill()
    rank.kill()
    second.communicate()
    done = finish(first)
    assert done.returncode == 0, done.stderr
    starts = [line for line in lines_of(run) if isinstance(line, StartLine)]
    assert starts[0].step == 0 < starts[-1].step
    assert Job.from_yaml(run / "job.yaml").ranks == 1
    assert_same_training(run, alone)


@pytest.mark.slow
def test_an_agent_that_comes_later_takes_part(job: Path, tmp_path: Path):
    run, alone, port = tmp_path / "run", tmp_path / "alone", free_port()
    slow = ("--set", "model=slow_models:slow", "--set", "steps=400", "--set", "evaluate_every=400")
    trained(job, "--out", alone, *slow)
    first = agent(port, "1:2", job, "--out", run, *slow)
    wait_until(lambda: len(steps_of(run)) >= 3, first)
    both = [first, agent(port, "1:2", job, "--out", run, *slow)]
    ends = [finish(one) for one in both]
    assert [end.returncode for end in ends] == [0, 0], "".join(end.stderr for end in ends)
    steps = steps_of(run)
    assert_each_sample_once(steps, 400)
    assert {len(step.peak_bytes_of_ranks) for step in steps} == {0, 2}
    assert [step.num_units for step in steps] == [step.num_units for step in steps_of(alone)]


@pytest.mark.slow
def test_four_then_two_then_three_ranks(job: Path, alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    trained(job, "--out", run, "--nproc", 4, "--set", "steps=4")
    trained("--resume", "--out", run, "--nproc", 2, "--set", "steps=8")
    trained("--resume", "--out", run, "--nproc", 3, "--set", f"steps={NUM_STEPS}")
    assert_same_training(run, alone)


@pytest.mark.slow
def test_a_stop_ends_all_ranks_after_the_same_step(job: Path, alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    process = start("train", job, "--out", run, "--nproc", 2)
    wait_until(lambda: len(steps_of(run)) >= 2, process)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert done.stderr.count("which is saved: resume with") == 1
    trained("--resume", "--out", run)
    assert_same_training(run, alone)


@pytest.mark.slow
def test_a_budget_that_holds_a_part_of_a_batch_is_held_by_every_rank(job: Path, alone: Path, tmp_path: Path):
    """Each rank has its own limit. If memory runs out on one rank, the step is split on all."""
    run = tmp_path / "run"
    trained(job, "--out", run, "--nproc", 2, PLIMSOLL_FAILPOINTS="backward@3,optimizer@5,fetch@4")
    assert_same_training(run, alone)


def test_ranks_with_different_jobs_are_refused_by_name(alone: Path, tmp_path: Path):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
        for name in ("job.yaml", "plan.json", "prepared.json"):
            (folder / name).write_bytes((alone / name).read_bytes())
        (folder / "metrics.jsonl").touch()
    text = (folders[1] / "job.yaml").read_text()
    (folders[1] / "job.yaml").write_text(text.replace("lr: 0.01", "lr: 0.02"))
    # Each rank gets the folder of its number.
    program = "import os, sys; from plimsoll.cli.main import main; "
    program += "sys.argv = ['plimsoll', 'train-worker', sys.argv[1 + int(os.environ['RANK'])], '--quiet']; main()"
    ranks = start_ranks(2, ["-c", program, *folders])
    ends = [finish(rank) for rank in ranks]
    assert [end.returncode for end in ends] == [2, 2]
    assert "2 ranks cannot train together: rank 1 differs in job.yaml (" in ends[0].stderr


def test_what_the_first_rank_refuses_is_said_once_and_all_end_with_it(job: Path, tmp_path: Path):
    text = job.read_text().replace("hidden_size: 32", "hidden_sise: 32")
    bad = tmp_path / "bad.yaml"
    bad.write_text(text)
    ends = [finish(rank) for rank in start_ranks(2, ["-m", "plimsoll", "train", bad, "--out", tmp_path / "run"])]
    assert [end.returncode for end in ends] == [2, 2]
    assert "hidden_sise" in ends[0].stderr
    assert "error" not in ends[1].stderr


@pytest.mark.long
@pytest.mark.parametrize(("rank", "whom"), [("0", "waiting for clients"), ("1", "")])
def test_a_rank_that_nobody_meets_says_where_it_waited(rank: str, whom: str):
    alone_of_two = environment(
        RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), PLIMSOLL_RANKS_TIMEOUT="2"
    )
    command = [sys.executable, "-m", "plimsoll", "train-worker", os.devnull]
    done = subprocess.run(command, env=alone_of_two, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert f"rank {rank}: error: rank {rank} of 2 could not connect to the others at 127.0.0.1:" in done.stderr
    assert whom in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nproc", "16"), "ranks 16 exceeds batch_size 15"),
        (("--nproc", "0"), "--nproc"),
        (("--set", "ranks=two"), "ranks"),
    ],
)
def test_numbers_of_ranks_that_cannot_be_are_refused(job: Path, tmp_path: Path, arguments, words):
    done = plimsoll("train", job, "--out", tmp_path / "run", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "run").exists()


def test_nproc_under_torchrun_is_refused(job: Path, tmp_path: Path):
    done = plimsoll("train", job, "--out", tmp_path / "run", "--nproc", 2, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "leave --nproc out" in done.stderr


def test_a_number_of_ranks_without_this_ones_is_refused(job: Path, tmp_path: Path):
    done = plimsoll("train", job, "--out", tmp_path / "run", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "WORLD_SIZE=2 is set, but RANK is not: start the processes with torchrun" in done.stderr


@pytest.mark.slow
def test_the_state_of_a_stream_goes_on_with_another_number_of_ranks(tmp_path: Path):
    """Each rank has the state of its own stream slots; a checkpoint contains the states of all."""
    data = {**SMALL_JOB["data"], "order": "streams"}  # type: ignore[dict-item]
    changes = {"data": data, "batch_size": 7, "steps": NUM_STEPS, "evaluate_every": 3, "optimizer": {"lr": 1e-3}}
    job = write_job(tmp_path / "job.yaml", model=MODEL, **changes)
    alone, run = tmp_path / "alone", tmp_path / "run"
    trained(job, "--out", alone)
    trained(job, "--out", run, "--nproc", 2, "--set", "steps=5")
    trained("--resume", "--out", run, "--nproc", 3, "--set", "steps=9")
    trained("--resume", "--out", run, "--set", f"steps={NUM_STEPS}")
    assert_same_training(run, alone)
