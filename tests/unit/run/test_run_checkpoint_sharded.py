"""Sharded checkpoints on disk; that they go on with other numbers of ranks is in `tests/numerics/test_shards.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.ranks_program import batch_of, loss_of, stacked_model
from torch import nn

from plimsoll.errors import CheckpointError, OutputError
from plimsoll.ranks import Ranks
from plimsoll.run import checkpoint, checkpoint_sharded
from plimsoll.run.rehearsed_ranks import joined_alone
from plimsoll.techniques._sharded import ShardedTraining, Sharding, mesh_of
from plimsoll.workload import Workload

MARKS = {"job": "of the test"}


def workload_of(model: nn.Module) -> Workload:
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=0.1), loss_of, "samples")


@pytest.fixture
def trained() -> Iterator[Workload]:
    """One rank, alone, after a step in shards."""
    workload = workload_of(stacked_model())
    with joined_alone():
        sharded = ShardedTraining(workload, Sharding(keeps_gathered=True), mesh_of(workload))
        sharded.shard()
        workload.sharded = sharded
        loss_of(workload.model, batch_of(0)).backward()
        sharded.hand_over()
        workload.optimizer.step()
        yield workload


def save(root: Path, step: int, workload: Workload) -> checkpoint.Checkpoint:
    facts = {"random_state": {"of": torch.ones(2)}, "progress": {"fingerprint": MARKS}, "keep": 2}
    return checkpoint_sharded.save(root, step, workload=workload, ranks=Ranks(), **facts)


def test_what_was_written_in_shards_is_read_whole(tmp_path, trained):
    save(tmp_path, 7, trained)
    saved = checkpoint.load(tmp_path, MARKS)
    assert saved.step == 7
    assert checkpoint_sharded.is_sharded(saved)
    whole = workload_of(stacked_model())
    whole.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.5)
    assert torch.equal(checkpoint_sharded.restore(saved, whole)["of"], torch.ones(2))
    for (name, parameter), rows in zip(whole.model.named_parameters(), trained.sharded.rows.values(), strict=True):
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
    saved = checkpoint.save(tmp_path, 3, model=whole.model, optimizer=whole.optimizer, **facts)
    checkpoint_sharded.restore(saved, trained)
    for parameter, rows in zip(whole.model.parameters(), trained.sharded.rows.values(), strict=True):
        assert torch.equal(parameter, rows)
        assert torch.equal(whole.optimizer.state[parameter]["exp_avg"], trained.optimizer.state[rows]["exp_avg"])


def test_the_last_few_are_kept_and_a_torn_one_is_refused(tmp_path, trained):
    for step in (1, 2, 3):
        save(tmp_path, step, trained)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    shard = next((tmp_path / "step-00000003" / "shards").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step 3 .* is torn \(shards/.*; the one of step 2 is good"):
        checkpoint.load(tmp_path, MARKS)


def test_where_nothing_can_be_written_the_earlier_ones_stay(tmp_path, trained):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OutputError, match=r"cannot write the checkpoint of step 1 .*: free some space"):
        save(tmp_path / "file" / "below", 1, trained)
    assert not list(tmp_path.glob("*step-*"))


def test_a_checkpoint_of_another_model_is_refused_by_the_parameter_it_lacks(tmp_path, trained):
    saved = save(tmp_path, 1, trained)
    with pytest.raises(CheckpointError, match=r"has no 0.bias \(nor 1 other parameters"):
        checkpoint_sharded.restore(saved, workload_of(nn.Sequential(nn.Linear(2, 2))))
