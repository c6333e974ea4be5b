"""One rank's shards of a model, with nobody else: what is left of the model, and that all of it comes back."""

from collections.abc import Iterator

import pytest
import torch
from tests.ranks_program import batch_of, loss_of, stacked_model

from plimsoll.run.rehearsed_ranks import joined_alone, rehearsed_ranks
from plimsoll.techniques._sharded import ShardedTraining, Sharding, mesh_of
from plimsoll.workload import Workload


@pytest.fixture
def workload() -> Workload:
    model = stacked_model()
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=0.1), loss_of, "samples")


@pytest.fixture
def sharded(workload: Workload) -> Iterator[ShardedTraining]:
    with joined_alone():
        sharded = ShardedTraining(workload, Sharding(keeps_gathered=False), mesh_of(workload))
        sharded.shard()
        yield sharded


def gradients(workload: Workload) -> None:
    loss_of(workload.model, batch_of(0)).backward()


def test_the_optimizer_has_the_rows_and_their_gradients(workload, sharded):
    gradients(workload)
    assert all(rows.grad is None for rows in sharded.rows.values())
    sharded.hand_over()
    plain = stacked_model()
    loss_of(plain, batch_of(0)).backward()
    for (name, expected), parameter in zip(
        plain.named_parameters(), workload.optimizer.param_groups[0]["params"], strict=True
    ):
        assert parameter is sharded.rows[name]
        torch.testing.assert_close(parameter.grad, expected.grad)
        assert sharded.shards[name].grad is None


def test_after_a_reset_the_next_pass_adds_to_nothing(workload, sharded):
    gradients(workload)
    loss = loss_of(workload.model, batch_of(1))  # whose backward pass never comes
    sharded.reset()
    del loss
    gradients(workload)
    sharded.hand_over()
    plain = stacked_model()
    loss_of(plain, batch_of(0)).backward()
    torch.testing.assert_close(sharded.rows["first.weight"].grad, plain.first.weight.grad)


def test_the_norm_is_that_of_all_gradients_and_they_are_clipped_to_it(workload, sharded):
    gradients(workload)
    sharded.hand_over()
    plain = stacked_model()
    loss_of(plain, batch_of(0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(sharded.clip(0.1), expected)
    torch.testing.assert_close(sharded.rows["last.bias"].grad, plain.last.bias.grad)


def test_model_and_optimizer_come_back_as_they_were_but_for_what_they_learned(workload):
    model, before = workload.model, stacked_model()
    kinds, own = [type(module) for module in model.modules()], list(model.parameters())
    hooks = [
        {key: len(value) for key, value in vars(one).items() if "_hooks" in key and value is not None}
        for one in model.modules()
    ]
    plain = torch.optim.AdamW(before.parameters(), lr=0.1)
    loss_of(before, batch_of(0)).backward()
    plain.step()
    with joined_alone():
        for _ in range(2):  # torch's classes are off again, so it can be done again
            sharded = ShardedTraining(workload, Sharding(keeps_gathered=True), mesh_of(workload))
            sharded.shard()
            if not workload.optimizer.state:
                gradients(workload)
                sharded.hand_over()
                workload.optimizer.step()
            sharded.gather()
    assert [type(module) for module in model.modules()] == kinds
    assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
    assert hooks == [
        {key: len(value) for key, value in vars(one).items() if "_hooks" in key and value is not None}
        for one in model.modules()
    ]
    assert all(one is other for one, other in zip(workload.optimizer.param_groups[0]["params"], own, strict=True))
    for parameter, expected in zip(own, before.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), expected.detach())
        torch.testing.assert_close(workload.optimizer.state[parameter]["exp_avg"], plain.state[expected]["exp_avg"])


def test_rows_are_cut_as_torch_cuts_them(workload):
    with rehearsed_ranks(4) as ranks:
        workload.ranks = ranks
        sharded = ShardedTraining(workload, Sharding(keeps_gathered=False), mesh_of(workload))
        whole = {name: parameter.detach().clone() for name, parameter in workload.model.named_parameters()}
        sharded.shard()
        for name, rows in sharded.rows.items():
            assert rows.shape == whole[name].chunk(4)[0].shape
            assert torch.equal(rows, sharded.rows_of(whole[name]))
        ranks.rank = 3
        assert sharded.rows_of(torch.arange(3)).numel() == 0
        assert sharded.rows_of(torch.arange(19)).tolist() == [15, 16, 17, 18]
