"""The shards of one rank without its peers: the remaining model, and the restored one."""

from collections.abc import Iterator

import pytest
import torch
from tests.ranks_program import batch_of, loss_of, stacked_model
from torch.distributed.fsdp import fully_shard

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.device.off_device import keeps_states_outside
from plimsoll.models.workload import Workload
from plimsoll.planning.dry_run.ranks import dry_run_ranks, joined_alone
from plimsoll.records.plan import Choice
from plimsoll.step.failpoints import exhaust_memory
from plimsoll.techniques import installed
from plimsoll.techniques.mechanisms import sharded as _sharded
from plimsoll.techniques.mechanisms.sharded import ShardedTraining, Sharding, mesh_of


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
    torch.testing.assert_close(sharded.clip([], 0.1), expected)
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
    with dry_run_ranks(4) as ranks:
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


def test_rows_gradients_and_states_are_in_the_file_and_what_was_built_in_files_comes_back_there():
    workload = Workload(model := stacked_model(), torch.optim.AdamW(model.parameters(), lr=0.1), loss_of, "samples")
    workload.files = MappedPool()
    for parameter in model.parameters():
        parameter.data = workload.files.copy_of(parameter)
    before = [one.detach().clone() for one in model.parameters()]
    choice = Choice(technique="fully_shard", options={"gathered": "twice", "offload": "disk"})
    with dry_run_ranks(2) as ranks:
        workload.ranks = ranks
        with installed(workload, [choice]):
            sharded = workload.hooks.sharding
            assert isinstance(sharded, ShardedTraining)
            for name, shard in sharded.shards.items():
                shard.grad = sharded.as_part(name, torch.ones_like(sharded.rows[name]))
                for hook in shard._post_accumulate_grad_hooks.values():  # which torch calls
                    hook(shard)
            sharded.hand_over()
            workload.optimizer.step()
            rows = list(sharded.rows.values())
            assert all(workload.files.holds(tensor) for one in rows for tensor in (one, one.grad))
            assert all(len(workload.optimizer.state[one]) == 3 for one in rows)
            assert keeps_states_outside(workload.optimizer)
    assert all(workload.files.holds(one) for one in model.parameters())
    assert [one.shape for one in model.parameters()] == [one.shape for one in before]


def test_memory_that_runs_out_on_the_way_in_leaves_the_model_as_it_was(workload, monkeypatch):
    kinds, own = [type(module) for module in workload.model.modules()], list(workload.model.parameters())
    expected, calls = [one.detach().clone() for one in own], []

    def second_call_fails(module, **options):
        calls.append(module)
        return exhaust_memory() if len(calls) == 2 else fully_shard(module, **options)

    second_call_fails.state = fully_shard.state
    with joined_alone():
        sharded = ShardedTraining(workload, Sharding(keeps_gathered=False), mesh_of(workload))
        monkeypatch.setattr(_sharded, "fully_shard", second_call_fails)
        with pytest.raises(RuntimeError, match="allocate"):
            sharded.shard()
        assert [type(module) for module in workload.model.modules()] == kinds
        assert all(one is other for one, other in zip(workload.model.parameters(), own, strict=True))
        assert all(map(torch.equal, own, expected))
        sharded = ShardedTraining(workload, Sharding(keeps_gathered=False), mesh_of(workload))
        sharded.shard()
        sharded.gather()
    assert all(map(torch.equal, own, expected))


def test_an_infinite_gradient_of_one_rank_is_one_of_all(workload, sharded):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(workload.model, batch_of(0))).backward()
    sharded.hand_over()
    scaler.unscale_(workload.optimizer)
    sharded.agree_on_infinities(scaler, workload.optimizer)
    assert not sum(scaler._found_inf_per_device(workload.optimizer).values())
    workload.ranks.agree = lambda flag, place=0: True  # another rank reports an infinity
    workload.ranks.require_all = lambda place=0: None
    sharded.agree_on_infinities(scaler, workload.optimizer)
    assert sum(scaler._found_inf_per_device(workload.optimizer).values()) == 1
