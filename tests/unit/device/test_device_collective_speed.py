"""The speed of exchanges between ranks: measured over gloo with one process, and assumed for GPUs, by hand."""

import pytest
import torch.distributed as dist

from plimsoll.device.collective_speed import exchange_of, measure_exchange, measured_exchange
from plimsoll.device.cuda.gpus import find_gpu
from plimsoll.records.base import cache_folder
from plimsoll.records.device import DeviceSpec

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exchange")


@pytest.fixture
def here(monkeypatch, folder):
    monkeypatch.setenv("PLIMSOLL_CACHE", str(folder))
    return measured_exchange(2)


def test_two_ranks_are_measured_in_one_process(here):
    assert (here.source, here.num_ranks) == ("measured", 2)
    assert set(here.bytes_per_second) == {"all_reduce", "all_gather", "reduce_scatter"}
    for curve in here.bytes_per_second.values():
        assert [point.at for point in curve] == [MIB, 8 * MIB]
        assert all(point.rate > 0 for point in curve)
    assert here.call_seconds > 0
    assert not dist.is_initialized()


def test_a_measurement_is_kept(here):
    said = []
    assert measured_exchange(2, said.append) == here
    assert said == []
    for path in cache_folder().glob("exchange-2-*.json"):
        path.write_text("torn")
    measured_exchange(2, said.append)
    assert said == ["measuring collectives of 2 ranks, once"]


def test_three_ranks_meet_too_and_many_are_not_started():
    three, many = measure_exchange(3), measure_exchange(64)
    assert [point.at for point in three.bytes_per_second["all_gather"]] == [MIB, 8 * MIB]
    assert many.num_ranks == 64


def test_gpus_without_nvlink_go_through_the_link_of_the_host():
    """A ring of 4 moves 3/4 of a tensor over a 10 GB/s link, which reaches 4 GB/s: 16/3 GB/s for the whole tensor."""
    card = DeviceSpec(
        name="by hand", architecture="8.6", capacity_bytes=1, capacity_high_bytes=1, capacity_source="hand",
        host_link_bytes_per_second=10_000_000_000,
    )  # fmt: skip
    speed = exchange_of(card, 4)
    assert speed.source == "assumed"
    assert speed.bytes_per_second["all_gather"][0].rate == pytest.approx(16e9 / 3)
    assert speed.bytes_per_second["reduce_scatter"][0].rate == pytest.approx(16e9 / 3)
    assert speed.bytes_per_second["all_reduce"][0].rate == pytest.approx(8e9 / 3)


def test_a_card_with_nvlink_exchanges_faster_than_its_sister_without():
    with_it, without = (exchange_of(find_gpu(name), 2) for name in ("A100-SXM4-40GB", "A100-PCIE-40GB"))
    rates = [one.bytes_per_second["all_reduce"][0].rate for one in (with_it, without)]
    assert rates[0] > 10 * rates[1]


def test_a_sharded_model_asks_before_each_exchange():
    speed = exchange_of(find_gpu("rtx3060"), 2)
    gathered, added = speed.seconds_of("all_gather", 0), speed.seconds_of("all_reduce", 0)
    assert gathered == pytest.approx(added + speed.agree_seconds)
