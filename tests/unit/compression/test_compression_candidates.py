"""Creation of smaller models from small real models: the reported facts agree with the folder."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from model_folders import model_folder, some_texts
from plimsoll.compression import evidence
from plimsoll.compression.candidates import Workshop, _row_seconds, answers_of, measured, print_measured
from plimsoll.compression.evidence import JobEvidence, TextEvidence
from plimsoll.compression.worker import ShrinkRequest, Source
from plimsoll.data.tokens.model_tokenizer import load_model_tokenizer
from plimsoll.errors import InputError, WeightsError
from plimsoll.models.build import save_model
from plimsoll.models.loading import load_model
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.records.allocator import TIGHT_HEAP
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice
from plimsoll.records.prediction import Estimate
from plimsoll.records.shrink import InferenceCost

LAYERS, INT8, EMBEDDINGS, VOCABULARY = (
    Choice(technique="layers", options={"keep": 1}),
    Choice(technique="int8"),
    Choice(technique="int8_embeddings"),
    Choice(technique="vocabulary"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Create a BERT classifier and its labelled texts."""
    root = tmp_path_factory.mktemp("shrinking")
    model_folder(root / "model", "BertForSequenceClassification", num_labels=2, hidden_size=64, intermediate_size=128)
    texts = some_texts(40, 10)
    rows = ({"text": text.replace("w7", "w1"), "label": "ab"[number % 2]} for number, text in enumerate(texts))
    (root / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def workshop(place):
    return Workshop(place / "model", JobEvidence(job_of(place), place / "cache"))


def job_of(place):
    return Job.from_fields({
        "model": str(place / "model"), "task": "classification", "tokenizer": {"path": str(place / "model")},
        "data": {"train": str(place / "x.jsonl"), "label": "label", "validation": 0.25},
        "sequence_length": 16, "batch_size": 4,
    })  # fmt: skip


def original(place):
    return Source(folder=str(place / "model"))


def file_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_without_a_chain_it_is_the_original(place, workshop, tmp_path):
    made = workshop.make(original(place), (), tmp_path / "same")
    assert (made.form, made.has_own_tokenizer) == ("plain", False)
    assert made.file_bytes == file_bytes(tmp_path / "same") == pytest.approx(file_bytes(place / "model"), rel=0.02)
    before, after = (load_model(folder).model.state_dict() for folder in (place / "model", tmp_path / "same"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_evaluated_is_what_is_written(place, workshop, tmp_path):
    made = workshop.make(original(place), (LAYERS, INT8), tmp_path / "small")
    assert made.form == "torchao"
    assert made.weight_bytes == workshop.weight_bytes((LAYERS, INT8))
    assert made.weight_bytes < 0.6 * workshop.weight_bytes(())
    again = workshop.evidence.quality(load_model(tmp_path / "small").model, None)
    assert again.loss == pytest.approx(made.quality.loss, rel=1e-5)
    assert again.accuracy == made.quality.accuracy


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Create an embedding model with weights in bfloat16, next to its texts."""
    folder = model_folder(tmp_path_factory.mktemp("half") / "model", "BertModel", hidden_size=64, intermediate_size=128)
    load_model(folder, dtype=torch.bfloat16).model.save_pretrained(folder)
    (folder.parent / "x.txt").write_text("w1 w2\nw3\n")
    return folder


@pytest.mark.parametrize(
    "chain",
    [(), (LAYERS,), (INT8,), (LAYERS, INT8), (INT8, EMBEDDINGS), (VOCABULARY,), (VOCABULARY, INT8)],
    ids=lambda chain: " > ".join(map(str, chain)) or "original",
)
def test_sizes_are_known_without_making_a_model_that_is_stored_in_fewer_bits(half, tmp_path, chain):
    workshop = Workshop(half, TextEvidence(half, half.parent / "x.txt"))
    made = workshop.make(Source(folder=str(half)), chain, tmp_path / "small")
    assert made.weight_bytes == workshop.weight_bytes(chain)
    written = load_model(tmp_path / "small", head="none").model
    assert {one.dtype for one in written.parameters() if type(one.data) is torch.Tensor} <= {torch.bfloat16}
    again = workshop.evidence.quality(written, tmp_path / "small" if made.has_own_tokenizer else None)
    assert again.similarity == pytest.approx(made.quality.similarity, abs=1e-2)


def test_a_model_without_a_place_is_judged_and_written_nowhere(place, workshop, tmp_path):
    kept = workshop.make(original(place), (LAYERS,), tmp_path / "deep" / "small")
    assert workshop.make(original(place), (LAYERS,), None) == kept


def test_tokens_that_nobody_counted_are_not_taken_for_ones_that_are_not_there(place, tmp_path):
    job = job_of(place)
    data = job.data.model_copy(update={"on_the_fly": True, "long_texts": "truncate"})
    workshop = Workshop(place / "model", JobEvidence(job.model_copy(update={"data": data}), place / "cache"))
    with pytest.raises(WeightsError, match="vocabulary needs token counts .*: leave out data.on_the_fly"):
        workshop.make(original(place), (VOCABULARY,), tmp_path / "small")
    assert workshop.make(original(place), (LAYERS,), tmp_path / "small").form == "plain"


def test_a_model_that_fails_on_the_data_is_said_with_what_was_done_to_it(tmp_path):
    folder = model_folder(tmp_path / "model", "BertModel", vocab_size=50)
    (tmp_path / "x.txt").write_text("w80\n")
    workshop = Workshop(folder, TextEvidence(folder, tmp_path / "x.txt"))
    for chain, name in (((), "the original"), ((LAYERS,), r"layers\(?=?1?.*")):
        with pytest.raises(InputError, match=f"after {name} fails on the evaluation data .IndexError: "):
            workshop.make(Source(folder=str(folder)), chain, None)


def test_texts_are_read_with_the_tokenizer_that_a_method_made(place, workshop, tmp_path):
    before = workshop.make(original(place), (), tmp_path / "same").quality
    made = workshop.make(original(place), (VOCABULARY,), tmp_path / "small")
    assert made.has_own_tokenizer
    assert len(load_model_tokenizer(tmp_path / "small")) < len(load_model_tokenizer(place / "model"))
    assert made.quality.loss == pytest.approx(before.loss, rel=1e-6)
    source = Source(folder=str(tmp_path / "small"), tokenizer=str(tmp_path / "small"))
    further = workshop.make(source, (LAYERS,), tmp_path / "smaller")
    assert further.has_own_tokenizer
    assert further.weight_bytes < made.weight_bytes


def test_weights_are_written_in_the_type_they_had(place, tmp_path):
    folder = model_folder(tmp_path / "half", "BertModel", dtype="bfloat16")
    load_model(folder, dtype=torch.bfloat16).model.save_pretrained(folder)
    (tmp_path / "x.txt").write_text("w1 w2\nw3\n")
    workshop = Workshop(folder, TextEvidence(folder, tmp_path / "x.txt"))
    workshop.make(Source(folder=str(folder)), (LAYERS,), tmp_path / "small")
    assert {weight.dtype for weight in load_model(tmp_path / "small").model.parameters()} == {torch.bfloat16}


def test_a_choice_that_cannot_be_is_refused_and_has_no_size(place, workshop, tmp_path):
    many = Choice(technique="layers", options={"keep": 7})
    with pytest.raises(WeightsError, match=r"layers\(keep=7\) cannot be used for .*leave it out, or change it"):
        workshop.make(original(place), (many,), tmp_path / "small")
    assert workshop.weight_bytes((many,)) is None


@pytest.mark.parametrize("kind", ["BertModel", "lstm"])
def test_a_chain_is_refused_from_the_configuration_alone(kind, tmp_path):
    """A chain is refused by the configuration alone, before texts or weights are read."""
    folder = tmp_path / "model"
    if kind == "lstm":
        folder.mkdir()
        save_model(build_recurrent({"architecture": "lstm", "vocab_size": 9, "hidden_size": 8}), folder)
    else:
        model_folder(folder, kind)
    workshop = Workshop(folder, TextEvidence(folder, tmp_path / "none.txt"))
    too_many = {"BertModel": LAYERS.model_copy(update={"options": {"keep": 99}}), "lstm": LAYERS}[kind]
    good = {"BertModel": LAYERS, "lstm": Choice(technique="units")}[kind]
    workshop.check((good,))
    with pytest.raises(WeightsError, match=re.escape(f"{too_many.in_full} cannot be used for {folder}")):
        workshop.check((good, too_many))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shares", ["tables", "layers"])
def test_weights_are_counted_once_where_they_are_shared_and_as_they_are_stored(shares, dtype, tmp_path):
    folder = model_folder(tmp_path / "given", "GPT2LMHeadModel")
    load_model(folder, dtype=getattr(torch, dtype)).model.save_pretrained(folder)
    (tmp_path / "x.txt").write_text("w1 w2\nw3\n")
    if shares == "layers":
        workshop = Workshop(folder, TextEvidence(folder, tmp_path / "x.txt"))
        shared = Choice(technique="shared_layers", options={"groups": 1})
        workshop.make(Source(folder=str(folder)), (shared,), tmp_path / "shared")
        folder = tmp_path / "shared"
    sized = Workshop(folder, TextEvidence(folder, tmp_path / "x.txt"))
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0 <= files - sized.weight_bytes(()) < 8192  # the header of the file


def test_every_method_offers_something_or_says_why_not(workshop):
    for offer in workshop.offers():
        assert bool(offer.choices) != bool(offer.reason), offer.method
        assert offer.saves


def test_a_model_beside_its_tokenizer_is_made_smaller_but_for_its_tokens(place, tmp_path):
    folder = model_folder(tmp_path / "model", "BertForSequenceClassification", num_labels=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    job = job_of(place).model_copy(update={"model": str(folder)})
    workshop = Workshop(folder, JobEvidence(job, place / "cache"))
    offers = {offer.method: offer for offer in workshop.offers()}
    assert offers["layers"].choices
    assert offers["vocabulary"].reason.startswith("the model has no tokenizer to reduce")
    assert not workshop.make(Source(folder=str(folder)), (LAYERS,), tmp_path / "small").has_own_tokenizer


def test_a_method_whose_models_cannot_be_judged_offers_nothing(half, workshop):
    texts = Workshop(half, TextEvidence(half, half.parent / "x.txt"))
    reasons, others = ({offer.method: offer.reason for offer in one.offers()} for one in (texts, workshop))
    assert reasons["hidden"].startswith("vectors of another size cannot be compared")
    assert not reasons["layers"]
    assert not others["hidden"]


def test_what_applying_takes_is_measured_and_predicted(place, workshop, monkeypatch):
    heaps = []  # recorded, because the real function would change the heap of this process
    monkeypatch.setattr("plimsoll.compression.candidates.set_up_heap", heaps.append)
    cost = measured(place / "model", workshop.evidence, None, place / "model")
    assert cost.peak_bytes >= cost.baseline_bytes > 0
    (batch,) = workshop.evidence.batches(None)
    assert (cost.rows, cost.longest_tokens) == batch["input_ids"].shape
    assert cost.rows == 10
    assert heaps == [TIGHT_HEAP.mmap_threshold_bytes, None]
    predicted = workshop.predicted(place / "model", cost)
    assert predicted.likely_bytes > cost.baseline_bytes


def test_a_model_is_timed_in_turn_with_the_original_in_eight_passes(place, workshop, monkeypatch, tmp_path):
    """A model is timed in turn with the original, in eight passes each.

    The fake clock counts one second for each weight.
    """
    asked = []

    def row_seconds(compute, model, batch):
        compute(model, batch)
        asked.append(len(batch["input_ids"]))
        return float(sum(weight.numel() for weight in model.parameters()))

    monkeypatch.setattr("plimsoll.compression.candidates.set_up_heap", lambda threshold: None)
    monkeypatch.setattr("plimsoll.compression.candidates._row_seconds", row_seconds)
    monkeypatch.setattr(evidence, "_TOKENS_PER_PASS", 16)
    workshop.make(original(place), (LAYERS,), tmp_path / "small")
    passes = []

    def count(model, given, output):
        passes.append(type(model).__name__)

    with register_module_forward_hook(count):
        cost = measured(tmp_path / "small", workshop.evidence, None, place / "model")
    assert passes.count("BertForSequenceClassification") == 8 + 2 * 8  # for the peak, then for the times of both models
    small, whole = (
        sum(weight.numel() for weight in load_model(folder).model.parameters())
        for folder in (tmp_path / "small", place / "model")
    )
    assert (cost.row_seconds, cost.speed) == (small, whole / small)
    assert asked == [1] * 16  # one of the ten texts each time


def test_what_a_process_measures_is_read_with_what_is_predicted_of_it(half, tmp_path, monkeypatch):
    """The measurements of a process are read together with their prediction.

    The process is simulated in this one.
    """

    def run(command, input, *, capture_output, text, check, **_):
        assert (command[-1], capture_output, text, check) == ("measure-worker", True, True, False)
        printed = io.StringIO("a library prints what nobody asked for\n")
        printed.seek(0, io.SEEK_END)
        monkeypatch.setattr("sys.stdin", io.StringIO(input))
        with contextlib.redirect_stdout(printed):
            print_measured()
        return subprocess.CompletedProcess(command, 0, printed.getvalue(), "")

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("plimsoll.compression.candidates.set_up_heap", lambda threshold: None)
    answers = answers_of(ShrinkRequest(folder=str(half), cache=str(tmp_path), data=str(half.parent / "x.txt")))
    answers["make"](source={"folder": str(half)}, chain=[VOCABULARY.model_dump()], target=str(tmp_path))
    for source in ({"folder": str(half)}, {"folder": str(tmp_path), "tokenizer": str(tmp_path)}):
        cost = InferenceCost.model_validate(answers["measured"](source=source))
        assert (cost.rows, cost.longest_tokens) == (2, 4)
        assert cost.peak_bytes >= cost.baseline_bytes > 0
        assert cost.predicted.likely_bytes > cost.predicted.measured_bytes == cost.baseline_bytes


@pytest.mark.parametrize(("said", "why"), [("a warning\nno room\n", "no room"), ("", "exit code 3")])
def test_a_model_that_cannot_be_applied_is_said_by_the_last_line(half, tmp_path, monkeypatch, said, why):
    monkeypatch.setattr("subprocess.run", lambda command, **_: subprocess.CompletedProcess(command, 3, "", said))
    answers = answers_of(ShrinkRequest(folder=str(half), cache=str(tmp_path), data=str(half.parent / "x.txt")))
    with pytest.raises(
        InputError, match=rf"inference with .* fails \({why}\): exclude the method that made it with --forbid"
    ):
        answers["measured"](source={"folder": str(half)})


def test_a_row_takes_its_part_of_the_faster_pass(monkeypatch):
    clock, passes = [100.0], [6.0, 4.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def compute(model, batch):
        clock[0] += passes.pop(0)

    assert _row_seconds(compute, None, {"input_ids": torch.zeros(2, 3)}) == 2.0


def test_a_training_is_predicted_of_what_can_be_trained(place, workshop, tmp_path):
    # replaces a measurement in another process
    workshop._training_baseline = Estimate(likely_bytes=0, low_bytes=0, high_bytes=0)
    alone, with_teacher = (workshop.predicted_training(original(place), one) for one in (None, str(place / "model")))
    assert workshop.weight_bytes(()) < alone.likely_bytes < 64 << 20  # far less than a real process has
    assert with_teacher.likely_bytes != alone.likely_bytes  # nearly equal: the teacher is freed before the peak
    texts = Workshop(place / "model", TextEvidence(place / "model", tmp_path / "x.txt"))
    assert texts.predicted_training(original(place), None) is None


def test_answers_are_plain_values(place):
    request = ShrinkRequest(folder=str(place / "model"), cache=str(place / "cache"), job=job_of(place))
    answers = answers_of(request)
    assert json.dumps(answers["offers"]())
    assert answers["check"](chain=[LAYERS.model_dump()]) is None
    assert answers["weight_bytes"](chain=[LAYERS.model_dump()]) > 0
    texts = answers_of(ShrinkRequest(folder=str(place / "model"), cache="", data=str(place / "x.jsonl")))
    asked = {"source": {"folder": str(place / "model")}, "teacher": None}
    assert texts["predicted_training"](**asked) is None  # embedding models are not trained
