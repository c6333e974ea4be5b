"""`plimsoll probe`: this machine, for people and for programs."""

from __future__ import annotations

import json

from plimsoll.device.probe import probe_machine
from plimsoll.records.device import Machine


def test_the_json_is_one_machine_record_and_nothing_else(call):
    code, out, err = call("probe", "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    machine = Machine.from_json(out)
    assert json.loads(machine.to_json()) == json.loads(out)
    here = probe_machine()
    assert machine.versions == here.versions
    assert [(device.name, device.hardware_bytes, device.limits) for device in machine.devices] == [
        (device.name, device.hardware_bytes, device.limits) for device in here.devices
    ]


def test_the_tables_name_every_device(call):
    code, out, err = call("probe")
    assert (code, err) == (0, "")
    for device in probe_machine().devices:
        assert device.name.split()[0] in out
    assert not out.startswith("{")
