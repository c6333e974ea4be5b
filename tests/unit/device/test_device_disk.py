"""The measured rate of the disk is plausible, and no files are left."""

import pytest

from plimsoll.device.disk import disk_bytes_per_second


def test_a_disk_is_measured_and_nothing_is_left(tmp_path):
    assert 1e5 < disk_bytes_per_second(tmp_path) < 1e12
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="none"):
        disk_bytes_per_second(tmp_path / "none")
