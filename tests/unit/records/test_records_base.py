"""Every record is restored unchanged from its JSON; other records are refused by name; writing is atomic."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import apply_records
import comparison_records
import corpus_records
import evidence_records
import placement_records
import plimsoll.records
import shrink_records
import strategy_records
import vector_records
from cache_records import cache_contents
from hand_traces import trace_of
from plimsoll.errors import OutputError, RecordError
from plimsoll.records.base import Record, cache_folder, write_atomically
from plimsoll.records.comparison import Calibration, Comparison, Learned, Side, Target
from plimsoll.records.lint import LintReport, Unread
from plimsoll.records.plan import Plan
from plimsoll.records.prepared import Prepared, PreparedText
from plimsoll.records.speed import ExchangeSpeed, Point, Speed
from plimsoll.records.watch import Line, ProcessUse, WatchEnd, WatchRecord, WatchSample
from prediction_records import fitting

for _module in pkgutil.iter_modules(plimsoll.records.__path__):
    importlib.import_module(f"plimsoll.records.{_module.name}")

RECORDS = sorted(
    (cls for cls in Record.__subclasses__() if cls.__module__.startswith("plimsoll.records.")),
    key=lambda cls: cls.record_kind,
)


@pytest.fixture
def examples(device, machine, plan, job, head, run_record) -> dict[type[Record], Record]:
    side = Side(peak_bytes=8, parts={"activations": 8}, moment=fitting().moment)
    comparison = Comparison(
        lowered_to="cpu", predicted=side, measured=side, num_ops=1, num_differing_ops=0, first=None, groups=(),
        num_groups=0,
    )  # fmt: skip
    calibration = Calibration(targets={"cpu": Target(live_ratio=Learned(num_runs=1, mean=1.0, low=1.0, high=1.0))})
    trace = trace_of(("setup", 0, "+w parameters 8 -w"))
    curve = (Point(at=1.0, rate=2.0),)
    speed = Speed(
        device="cpu", source="measured", flops_per_second={"float32": curve}, bytes_per_second={"plain": curve},
        op_seconds=1e-5, module_op_seconds=4e-5, backward_op_seconds=2e-5, link_bytes_per_second=1e9,
        host_bytes_per_second=1e10, spread=0.25,
    )  # fmt: skip
    exchange = ExchangeSpeed(
        device="cpu", source="assumed", num_ranks=2, bytes_per_second={"all_gather": curve}, call_seconds=1e-4,
        agree_seconds=1e-4,
    )  # fmt: skip
    seen = ProcessUse(
        pid=7, parent=1, name="python", private_bytes=8, file_bytes=4, shared_bytes=2, swap_bytes=0, data_bytes=9
    )
    sample = WatchSample(
        seconds=2.0, processes=(seen,), lines=(Line(kind="machine", name="all", used_bytes=8, limit_bytes=9),)
    )
    text = PreparedText(
        corpus_key="k", index_folder="i", num_documents=1, num_bytes=9, num_samples=1, num_skipped=0, skipped=()
    )
    prepared = Prepared(key="k", train=text, tokenizer_folder="t", vocab_size=9, end_id=4)
    made = (
        WatchRecord(subject="process 7", samples=(sample,), end=WatchEnd(seconds=3.0, how="gone", text="gone")),
        LintReport(findings=(), num_files=1, num_lines=2, unread=(Unread(file="a.py", reason="line 1: bad"),)),
        device, machine, plan, job, head, run_record, fitting(), trace, comparison, calibration, speed,
        exchange, cache_contents(),
        corpus_records.corpus_facts(), corpus_records.token_facts(), corpus_records.inspection(),
        corpus_records.feed_rates(), vector_records.subset_facts(), vector_records.vector_file(),
        vector_records.conversion(), vector_records.compression(), evidence_records.diagnosis(),
        comparison_records.comparison(), strategy_records.strategies(),
        shrink_records.shrunk(),
        placement_records.streamed_plan(), apply_records.apply_facts(), prepared,
    )  # fmt: skip
    return {type(record): record for record in made}


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.record_kind)
def test_a_record_comes_back_from_its_file(cls: type[Record], examples: dict[type[Record], Record], tmp_path: Path):
    record = examples[cls]  # a new record needs an example in conftest.py
    record.save(tmp_path / "record.json")
    assert cls.load(tmp_path / "record.json") == record
    head = json.loads((tmp_path / "record.json").read_text())
    assert (head["record"], head["schema"]) == (cls.record_kind, cls.schema_version)


def test_no_two_records_share_a_kind():
    assert len({cls.record_kind for cls in RECORDS}) == len(RECORDS)


PLAN = {"record": "plan", "schema": 2, "budget": {}, "fallbacks": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"record": "pl',
            "x.json is not JSON (Unterminated string starting at: line 1 column 12 (char 11)): it may be",
        ),
        (
            PLAN | {"record": "run"},
            "x.json holds a record of kind 'run', but 'plan' is needed here: give a file of that kind",
        ),
        ({"budget": {}}, "x.json holds a record of kind None, but 'plan' is needed here: give a file of that kind"),
        ([PLAN], "x.json holds a record of kind 'list', but 'plan' is needed here: give a file of that kind"),
        (
            PLAN | {"schema": 4},
            "x.json has schema version 4 of record 'plan'; this Plimsoll reads version 3: use the Plimsoll that",
        ),
        (
            {"record": "plan", "schema": 2, "budget": {}},
            "x.json is not a valid 'plan' record (fallbacks: Field required): make the record again",
        ),
        (PLAN | {"colour": 1}, "(colour: Extra inputs are not permitted)"),
        (PLAN | {"budget": {"device_bytes": -1}}, "(budget.device_bytes: Value error, cannot read -1 as a size"),
    ],
    ids=["torn", "other-kind", "no-kind", "list", "other-schema", "missing", "extra", "nested"],
)
def test_what_is_not_the_record_is_refused_by_name(content: object, message: str):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(RecordError) as caught:
        Plan.from_json(text, source="x.json")
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_record_error(tmp_path: Path):
    with pytest.raises(RecordError, match="there is no 'plan' record at .*plan.json: check the path"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(RecordError, match="Is a directory.*give a JSON file"):
        Plan.load(tmp_path)
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match="can't decode byte 0xff.*give a JSON file"):
        Plan.load(tmp_path / "plan.json")


def test_the_cache_is_in_the_temporary_folder_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch):
    for name in ("PLIMSOLL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # a user without a password entry, as in many containers
    assert cache_folder() == Path(tempfile.gettempdir(), "plimsoll-54321")


def test_a_record_cannot_be_changed(plan: Plan):
    with pytest.raises(ValueError, match="frozen"):
        plan.fallbacks = ()


def test_writing_replaces_the_content_and_leaves_nothing_else(tmp_path: Path):
    path = tmp_path / "record.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["record.json"]


WRITE_PAST_THE_LIMIT = """
import resource, signal, sys
from pathlib import Path
from plimsoll.errors import OutputError
from plimsoll.records.base import write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_atomically(Path(sys.argv[1]), bytes(8192))
except OutputError as error:
    print(error)
"""


def test_parts_that_cannot_be_made_leave_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "lines"
    write_atomically(path, [b"old ", b"lines"])

    def parts():
        yield b"new "
        raise MemoryError

    with pytest.raises(MemoryError):
        write_atomically(path, parts())
    assert path.read_bytes() == b"old lines"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_half_way_keeps_the_old_content(tmp_path: Path):
    """A write that fails half way keeps the old content.

    RLIMIT_FSIZE permits the first 4096 bytes and fails the rest, like a full disk.
    """
    path = tmp_path / "record.json"
    path.write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", WRITE_PAST_THE_LIMIT, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"cannot write {path}: File too large; give another --out, or free some space\n"
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_folder_that_does_not_exist_or_is_a_file_is_an_output_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="No such file or directory; give another --out, or make the folder"):
        write_atomically(tmp_path / "missing" / "record.json", b"")
    with pytest.raises(OutputError, match="Not a directory; give another --out$"):
        write_atomically(tmp_path / "file" / "record.json", b"")


def test_a_folder_that_cannot_be_written_is_an_output_error():
    """A folder that cannot be written is an output error.

    `/proc` refuses new files to every user, also to root.
    """
    with pytest.raises(OutputError, match="cannot write /proc/record.json"):
        write_atomically(Path("/proc/record.json"), b"")
