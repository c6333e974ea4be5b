"""`plimsoll probe`, on the machine that runs the tests."""

from typer.testing import CliRunner

from plimsoll.cli.main import app
from plimsoll.device.probe import probe_machine
from plimsoll.records.device import Machine


def test_json_is_one_record_and_nothing_else():
    done = CliRunner().invoke(app, ["probe", "--json"])
    assert (done.exit_code, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    found, expected = Machine.from_json(line), probe_machine()
    assert found.versions == expected.versions
    assert [device.name for device in found.devices] == [device.name for device in expected.devices]
    assert [device.limits for device in found.devices] == [device.limits for device in expected.devices]


def test_the_tables_name_every_device():
    done = CliRunner().invoke(app, ["probe"])
    assert done.exit_code == 0
    for device in probe_machine().devices:
        assert device.name[:20] in done.stdout
