"""The facts about this machine as one record."""

import platform

import torch

from plimsoll.device.probe import probe_machine
from plimsoll.records.device import Machine


def test_the_machine_is_every_device_and_the_versions_and_a_file():
    machine = probe_machine()
    assert machine.devices[0].kind == "cpu"
    assert len(machine.devices) == 1 + torch.cuda.device_count()
    assert machine.versions["torch"] == torch.__version__
    assert machine.versions["python"] == platform.python_version()
    assert Machine.from_json(machine.to_json()) == machine
