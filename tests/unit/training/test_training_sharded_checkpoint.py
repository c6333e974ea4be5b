"""Sharded checkpoints on disk. `tests/numerics/test_shards.py` resumes them with other numbers of ranks."""

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks_program import batch_of, loss_of, stacked_model
from torch import nn

from plimsoll.device.off_device import states_outside
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import CheckpointError, OutputError
from plimsoll.models.hooks import StepHooks
from plimsoll.models.workload import Workload
from plimsoll.planning.dry_run.ranks import joined_alone
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.techniques.mechanisms.sharded import ShardedTraining, Sharding, mesh_of
from plimsoll.training import checkpoint, sharded_checkpoint

MARKS = {"job": "of the test"}


def workload_of(model: nn.Module) -> Workload:
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=0.1), loss_of, "samples")


@pytest.fixture
def trained() -> Iterator[Workload]:
    """Return the training of a single rank after a step in shards."""
    workload = workload_of(stacked_model())
    with joined_alone():
        sharded = ShardedTraining(workload, Sharding(keeps_gathered=True), mesh_of(workload))
        sharded.shard()
        workload.hooks = StepHooks(sharding=sharded)
        loss_of(workload.model, batch_of(0)).backward()
        sharded.hand_over()
        workload.optimizer.step()
        yield workload


def save(root: Path, step: int, workload: Workload, **changes: Any) -> checkpoint.Checkpoint:
    facts = {"random_state": {"of": torch.ones(2)}, "progress": {"fingerprint": MARKS}, "keep": 2} | changes
    return sharded_checkpoint.save(root, step, workload=workload, ranks=Ranks(), **facts)


class Exhausting:
    """An object that runs out of memory when it is written."""

    def __reduce__(self) -> Any:
        exhaust_memory()


def test_what_was_written_in_shards_is_read_whole(tmp_path, trained):
    save(tmp_path, 7, trained)
    saved = checkpoint.load(tmp_path, MARKS)
    assert saved.step == 7
    assert sharded_checkpoint.is_sharded(saved)
    whole = workload_of(stacked_model())
    whole.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.5)
    assert torch.equal(sharded_checkpoint.restore(saved, whole)["of"], torch.ones(2))
    for (name, parameter), rows in zip(
        whole.model.named_parameters(), trained.hooks.sharding.rows.values(), strict=True
    ):
        assert torch.equal(parameter, rows), name
        state, expected = whole.optimizer.state[parameter], trained.optimizer.state[rows]
        assert {key: value.tolist() for key, value in state.items()} == {k: v.tolist() for k, v in expected.items()}
    settings, expected = (
        {key: value for key, value in one.optimizer.param_groups[0].items() if key != "params"}
        for one in (whole, trained)
    )
    assert settings == expected


def test_what_one_process_has_written_is_read_in_shards(tmp_path, trained):
    whole = workload_of(stacked_model())
    loss_of(whole.model, batch_of(1)).backward()
    whole.optimizer.step()
    facts = {"random_state": {}, "progress": {"fingerprint": MARKS}, "keep": 2}
    whole.optimizer.param_groups[0].update(lr=0.5)
    saved = checkpoint.save(tmp_path, 3, model=whole.model, optimizer=whole.optimizer, **facts)
    assert not sharded_checkpoint.is_sharded(saved)
    sharded_checkpoint.restore(saved, trained)
    for parameter, rows in zip(whole.model.parameters(), trained.hooks.sharding.rows.values(), strict=True):
        assert torch.equal(parameter, rows)
        state, expected = trained.optimizer.state[rows], whole.optimizer.state[parameter]
        assert {key: value.tolist() for key, value in state.items()} == {k: v.tolist() for k, v in expected.items()}
    (group,) = trained.optimizer.param_groups
    assert group["lr"] == 0.5
    assert all(map(operator.is_, group["params"], trained.hooks.sharding.rows.values()))


@pytest.mark.parametrize("is_read_whole", [True, False], ids=["shards read whole", "a whole one read in shards"])
def test_states_go_where_the_optimizer_keeps_them(tmp_path, trained, is_read_whole):
    """States as large as a parameter are copied to the optimizer's storage. The model's rows stay in place."""
    whole = workload_of(stacked_model())
    loss_of(whole.model, batch_of(1)).backward()
    whole.optimizer.step()
    facts = {"random_state": {}, "progress": {"fingerprint": MARKS}, "keep": 2}
    saved = (
        save(tmp_path, 3, trained)
        if is_read_whole
        else checkpoint.save(tmp_path, 3, model=whole.model, optimizer=whole.optimizer, **facts)
    )
    workload = whole if is_read_whole else trained
    made: list[torch.Tensor] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor.detach().clone())
        return made[-1]

    with states_outside(workload.optimizer, copied):
        sharded_checkpoint.restore(saved, workload)
    states = [state[name] for state in workload.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(states) == len(made)
    assert all(map(operator.is_, sorted(states, key=id), sorted(made, key=id)))


def test_buffers_are_saved_but_for_those_that_no_state_has(tmp_path):
    def with_buffers(value: float) -> Workload:
        model = stacked_model()
        model.register_buffer("kept", torch.full((2,), value))
        model.register_buffer("made_anew", torch.full((2,), value), persistent=False)
        return workload_of(model)

    with joined_alone():
        saved = save(tmp_path, 1, with_buffers(3.0))
    other = with_buffers(5.0)
    sharded_checkpoint.restore(saved, other)
    assert (other.model.kept.tolist(), other.model.made_anew.tolist()) == ([3, 3], [5, 5])


def test_the_last_few_are_kept_and_a_torn_one_is_refused(tmp_path, trained):
    for step in (1, 2, 3):
        save(tmp_path, step, trained, keep=4)
        assert len(list(tmp_path.iterdir())) == step  # no checkpoint has to be removed yet
    save(tmp_path, 3, trained, keep=2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    shard = next((tmp_path / "step-00000003" / "shards").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step 3 .* is damaged \(shards/.*; the checkpoint of step 2 is intact"):
        checkpoint.load(tmp_path, MARKS)


def test_where_nothing_can_be_written_the_earlier_ones_stay(tmp_path, trained):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OutputError, match=r"cannot write the checkpoint of step 1 .*: free some space"):
        save(tmp_path / "file" / "below", 1, trained)
    assert not list(tmp_path.glob("*step-*"))


@pytest.mark.parametrize("where", ["read", "written", "put in place"])
def test_where_memory_runs_out_nothing_is_left_and_it_can_be_tried_again(tmp_path, trained, monkeypatch, where):
    class Failing(sharded_checkpoint.FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            exhaust_memory()

    with monkeypatch.context() as patched, armed("checkpoint", *([1] if where == "read" else [])):
        if where == "written":
            patched.setattr(sharded_checkpoint, "FileSystemWriter", Failing)
        changes = {"random_state": Exhausting()} if where == "put in place" else {}
        with pytest.raises(MemoryError, match="memory"):
            save(tmp_path, 1, trained, **changes)
    assert list(tmp_path.iterdir()) == []
    assert save(tmp_path, 1, trained).step == 1


def test_a_disk_that_is_full_on_some_rank_is_said_with_the_rank(tmp_path, trained, monkeypatch):
    class Failing(sharded_checkpoint.FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharded_checkpoint, "FileSystemWriter", Failing)
    with pytest.raises(OutputError, match=r"of step 1 .*: rank 0: .*No space left on device.*: free some space"):
        save(tmp_path, 1, trained)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused_by_the_parameter_it_lacks(tmp_path, trained):
    saved = save(tmp_path, 1, trained)
    with pytest.raises(CheckpointError, match=r"has no 0.bias \(nor 3 other parameters"):
        sharded_checkpoint.restore(saved, workload_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
