import os
import subprocess
import sys

import pytest
import torch

from plimsoll.device import speed as speeds
from plimsoll.device.cuda.gpus import all_gpus, find_gpu
from plimsoll.device.speed import measured_speed, speed_of
from plimsoll.records.base import cache_folder
from plimsoll.records.device import DeviceSpec
from plimsoll.records.speed import rate_at


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("speed")


@pytest.fixture
def here(monkeypatch, folder):
    monkeypatch.setenv("PLIMSOLL_CACHE", str(folder))
    return measured_speed()


def rates(speed):
    curves = [*speed.flops_per_second.values(), *speed.bytes_per_second.values()]
    calls = [speed.op_seconds, speed.module_op_seconds, speed.backward_op_seconds]
    return [
        *calls,
        speed.host_bytes_per_second,
        speed.link_bytes_per_second,
        *(point.rate for curve in curves for point in curve),
    ]


def test_this_processor_is_measured(here):
    assert all(rate > 0 for rate in rates(here))
    assert here.source == "measured"
    assert not here.overlaps
    assert set(here.bytes_per_second) == {"plain", "strided", "transcendental", "normalize", "random", "gather"}


def test_points_of_a_curve_rise(here):
    for curve in (*here.flops_per_second.values(), *here.bytes_per_second.values()):
        assert [point.at for point in curve] == sorted({point.at for point in curve})


def test_threads_and_random_numbers_are_as_before():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)  # the gain of several threads is measured, too
    try:
        speeds.measure_speed()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one core: threads gain nothing")
def test_what_threads_gain_does_not_depend_on_other_programs():
    probe, num_threads = speeds._Probe("cpu"), torch.get_num_threads()
    torch.set_num_threads(2)
    others = []
    try:
        alone = probe.gain_of_threads()
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
        beside = probe.gain_of_threads()
    finally:
        torch.set_num_threads(num_threads)
        for other in others:
            other.kill()
            other.wait()
    assert 1.0 <= beside <= 2.0
    assert beside > 0.75 * alone


def test_a_measurement_is_kept(here, folder):
    said = []
    assert measured_speed(said.append) == here
    assert said == []
    assert len(list(folder.glob("speed-*.json"))) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("content", ["", '{"record": "speed", "sch', "[]"])
def test_a_torn_file_is_measured_again(here, folder, content):
    (path,) = folder.glob("speed-*.json")
    path.write_text(content)
    said = []
    speed = measured_speed(said.append)
    assert len(said) == 1
    assert measured_speed() == speed


def test_a_folder_that_cannot_be_written_does_no_harm(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "file" / "below"))
    assert measured_speed().op_seconds > 0


def test_the_usual_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("PLIMSOLL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "plimsoll"


def test_a_card_reaches_a_share_of_its_peaks():
    speed = speed_of(find_gpu("rtx3060"))  # 28 SMs x 256 x 1777 MHz = 12.738 TFLOP/s, 360 GB/s, PCIe 4.0 x16
    assert rate_at(speed.flops_per_second["float32"], 1e6) == pytest.approx(0.75 * 12.738e12, rel=1e-4)
    assert rate_at(speed.flops_per_second["bfloat16"], 1e6) == pytest.approx(2 * 0.75 * 12.738e12, rel=1e-4)
    assert speed.bytes_per_second["plain"][0].rate == pytest.approx(0.8 * 360e9)
    assert speed.link_bytes_per_second == pytest.approx(0.8 * 31.5e9)
    assert speed.overlaps


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_every_card_has_a_speed(gpu):
    assert all(rate > 0 for rate in rates(speed_of(gpu)))


def test_an_unknown_card_is_a_small_one():
    spec = DeviceSpec(name="new", architecture=None, capacity_bytes=1, capacity_high_bytes=1, capacity_source="made up")
    assert rate_at(speed_of(spec).flops_per_second["float32"], 1e6) == pytest.approx(0.75 * 20 * 256 * 1.7e9)
