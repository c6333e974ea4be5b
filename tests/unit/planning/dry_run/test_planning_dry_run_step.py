"""Dry runs of the real training step on fake tensors: the trace equals a real run to the byte."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tests.processor import skip_without_half_lstm
from torch import nn

from plimsoll.data.quick_facts import TextSketch, sketch_texts
from plimsoll.data.samples.teacher_cache import LOG_P, WORDS
from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models.build import build_model, save_model
from plimsoll.models.optimizers import build_optimizer
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.workload import model_loss
from plimsoll.planning.dry_run.step import (
    StageBackend,
    _batch,
    _telling_samples,
    dry_run_job,
    dry_run_samples,
    dry_run_step,
)
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.job_step import step_of
from plimsoll.step.train_step import TrainStep

TEXTS = TextSketch(vocab_size=300, num_labels=None, end_id=0)
WHOLE = (micro_batch_choice(6),)
LSTM = {"architecture": "lstm", "embedding_size": 16, "hidden_size": 16}


def job(**changes):
    fields = {"model": LSTM, "data": {"train": "nowhere.txt"}, "sequence_length": 8, "batch_size": 6}
    return Job.from_fields(fields | changes)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def loss(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_dry_run_of_a_step_needs_what_the_real_one_needs(micro_batch, clip_norm):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randint(50, (4, 6))
    options = {"units": lambda ids: ids.numel(), "clip_norm": clip_norm}
    choices = (micro_batch_choice(micro_batch or 4),)
    trace = dry_run_step(model, optimizer, batch, loss, CpuLowering(), precision="fp32", choices=choices, **options)

    step = TrainStep(
        model, optimizer, loss, micro_batch=micro_batch, recut_loss=True, **options
    )  # no rows are compared
    recorder = Recorder(phase=lambda: "copy" if step.position.phase == "fetch" else step.position.phase)
    with recorder:
        recorder.know_model(model)
        recorder.know((("", batch),), "inputs")
        for number in (1, 2, 3):
            recorder.step = number
            step(batch)
            recorder.know_optimizer(optimizer)
    measured = live_bytes(recorder.trace("measured", "cpu"))
    predicted = live_bytes(trace)
    assert predicted.peak_bytes == measured.peak_bytes
    row, measured_row = predicted.peak_row, measured.peak_row
    at_peak = {name: int(column[row]) for name, column in predicted.by_category.items() if column[row]}
    assert at_peak == {
        name: int(column[measured_row]) for name, column in measured.by_category.items() if column[measured_row]
    }


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", [0, 3, 6, 8], ids=lambda place: f"sample {place}")
@pytest.mark.parametrize("micro_batch", [2, 4, 5])
@pytest.mark.parametrize("is_by_length", [False, True])
def test_a_dry_run_finds_a_long_sample_wherever_it_is(place, micro_batch, is_by_length):
    """Recurrent layers pack the tokens of the mask, so the pass with the long sample needs most memory."""
    lengths = torch.tensor([3, 4, 2, 5, 4, 3, 2, 4, 3])
    lengths[place] = 16
    mask = (torch.arange(16) < lengths[:, None]).long()
    batch = {"input_ids": mask * 7, "attention_mask": mask, "labels": torch.arange(9) % 3}
    fields = {"architecture": "gru", "vocab_size": 20, "num_labels": 3, "embedding_size": 32, "hidden_size": 32}
    model = build_recurrent(fields)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    choices = (micro_batch_choice(micro_batch), *([Choice(technique="by_length")] if is_by_length else []))
    options = {"units": "samples", "clip_norm": None}
    trace = dry_run_step(
        model, optimizer, batch, model_loss, CpuLowering(), precision="fp32", choices=choices, **options
    )
    step = TrainStep(model, optimizer, fallbacks=[choices], **options)
    recorder = Recorder(phase=lambda: "copy" if step.position.phase == "fetch" else step.position.phase)
    with recorder:
        recorder.know_model(model)
        for number in (1, 2):
            recorder.step = number
            step(batch)
    measured_bytes = live_bytes(recorder.trace("measured", "cpu")).peak_bytes
    batch_bytes = sum(tensor.nbytes for tensor in batch.values())  # the dry run contains only a part of it
    predicted_bytes = live_bytes(trace).peak_bytes + batch_bytes  # plus memory inside kernels, which no recorder sees
    assert measured_bytes <= predicted_bytes <= 1.5 * measured_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_batch", [6, 4])
@pytest.mark.parametrize("reset", [None, "texts"])
@pytest.mark.parametrize("architecture", ["lstm", "gru", "rnn"])
def test_a_dry_run_of_a_step_on_streams_needs_what_the_real_one_needs(architecture, reset, micro_batch):
    fields = job(
        model=LSTM | {"architecture": architecture}, optimizer={"foreach": False},
        data={"train": "nowhere.txt", "order": "streams", "reset": reset},
    )  # fmt: skip
    choices = (micro_batch_choice(micro_batch),)
    predicted = live_bytes(dry_run_job(fields, TEXTS, CpuLowering(), choices))
    model = build_model(fields, *TEXTS.of_model).train()
    optimizer = build_optimizer(fields.optimizer, model.parameters())
    step = step_of(fields, model, optimizer, [choices])
    batch = _batch(fields, TEXTS, 6, 8)
    recorder = Recorder(phase=lambda: "copy" if step.position.phase == "fetch" else step.position.phase)
    with recorder:
        recorder.know_model(model)
        recorder.know(((name, field) for name, field in batch.items()), "inputs")
        for number in (1, 2, 3):
            recorder.step = number
            step(batch)
            recorder.know_optimizer(optimizer)
    measured = live_bytes(recorder.trace("measured", "cpu"))
    assert predicted.peak_bytes == measured.peak_bytes
    assert batch.keys() == {"input_ids", "labels", "slots", "windows"} | ({"resets"} if reset else set())


def test_the_model_and_the_optimizer_stay_as_they_were():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dry_run_step(
        model, optimizer, torch.randint(50, (4, 6)), loss, CudaLowering((8, 6)),
        units=lambda ids: ids.numel(), choices=(micro_batch_choice(2),), clip_norm=None, precision="bf16",
    )  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("lowering", [CpuLowering(), CudaLowering((8, 6))], ids=lambda one: one.name)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_job_has_three_steps_with_states_from_the_first(lowering, precision):
    if lowering.kind == "cpu" and precision == "bf16":
        skip_without_half_lstm()
    trace = dry_run_job(job(precision=precision), TEXTS, lowering, (micro_batch_choice(6),))
    assert set(trace.ops.step) == {0, 1, 2, 3}
    states = [row for row, category in enumerate(trace.storages.category) if category == "optimizer states"]
    parameters = [row for row, category in enumerate(trace.storages.category) if category == "parameters"]
    on_device = [row for row in states if not trace.storages.on_host[row]]
    assert {trace.ops.step[trace.storages.born[row]] for row in on_device} == {1}
    num_bytes = trace.storages.num_bytes
    assert sum(num_bytes[row] for row in on_device if num_bytes[row] > 4) == 2 * sum(
        num_bytes[row] for row in parameters if not trace.storages.on_host[row]
    )


def test_an_evaluation_comes_between_steps_where_the_job_says_so():
    held_out = {"train": "nowhere.txt", "validation": 0.1}
    for without in (job(), job(evaluate_every=5)):
        assert "evaluation" not in dry_run_job(without, TEXTS, CpuLowering(), WHOLE).ops.phase
    trace = dry_run_job(job(data=held_out, evaluate_every=5), TEXTS, CpuLowering(), WHOLE)
    assert {step for step, phase in zip(trace.ops.step, trace.ops.phase, strict=True) if phase == "evaluation"} == {2}
    trace = dry_run_job(job(data=held_out), TEXTS, CpuLowering(), WHOLE)
    assert {step for step, phase in zip(trace.ops.step, trace.ops.phase, strict=True) if phase == "evaluation"} == {3}


@pytest.mark.parametrize("lowering", [CpuLowering(), CudaLowering((8, 6))], ids=["cpu", "cuda"])
@pytest.mark.parametrize("micro_batch", [1, 3, 4, 7])
def test_an_evaluation_of_fewer_samples_needs_what_that_of_all_needs(monkeypatch, lowering, micro_batch):
    evaluating = job(data={"train": ["a.txt"], "validation": 0.1}, batch_size=16, evaluate_every=5)
    fewer = dry_run_job(evaluating, TEXTS, lowering, (micro_batch_choice(micro_batch),))
    monkeypatch.setattr("plimsoll.planning.dry_run.step._evaluated_samples", lambda num_samples, at_once: num_samples)
    whole = dry_run_job(evaluating, TEXTS, lowering, (micro_batch_choice(micro_batch),))
    assert fewer.ops.phase.count("evaluation") < whole.ops.phase.count("evaluation")
    assert _peaks_of_phases(fewer) == _peaks_of_phases(whole)


def _peaks_of_phases(trace):
    """Return the peak of each phase without the batches."""
    live = live_bytes(trace)
    phases = np.asarray(trace.ops.phase)[np.asarray(trace.event_op)[live.event]]
    beside = live.total - live.by_category["inputs"]
    return {phase: beside[phases == phase].max() for phase in set(phases)}


def test_smaller_micro_batches_need_less():
    peaks = [
        live_bytes(dry_run_job(job(batch_size=64), TEXTS, CpuLowering(), (micro_batch_choice(size),))).peak_bytes
        for size in (64, 16, 4)
    ]
    assert peaks[0] > peaks[1] > peaks[2]


class Broken(Net):
    def forward(self, ids):
        return self.head(self.embed(ids)[..., :3])


def test_a_model_that_fails_says_where_in_its_own_code():
    model = Broken()
    with pytest.raises(InputError, match="the model Broken fails in the forward phase") as caught:
        dry_run_step(
            model, torch.optim.SGD(model.parameters()), torch.randint(50, (4, 6)), loss, CpuLowering(),
            units=lambda ids: ids.numel(), choices=(micro_batch_choice(4),), clip_norm=None, precision="fp32",
        )  # fmt: skip
    assert "[..., :3]" in str(caught.value)
    assert "site-packages" not in str(caught.value)


def test_a_batch_without_a_field_that_the_model_needs_is_said():
    class NeedsMask(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x, mask):
            return self.head(x * mask)

    model = NeedsMask()
    with pytest.raises(InputError, match="missing 1 required positional argument: 'mask'"):
        dry_run_step(
            model, torch.optim.SGD(model.parameters()), {"x": torch.ones(2, 2)}, model_loss,
            CpuLowering(), units="samples", choices=(micro_batch_choice(4),), clip_norm=None, precision="fp32",
        )  # fmt: skip


@pytest.mark.parametrize("lowering", [CpuLowering(), CudaLowering((8, 6))], ids=lambda one: one.name)
def test_a_tagger_has_a_label_for_each_token(lowering):
    tagger = job(task="token-classification", model=LSTM | {"bidirectional": True}, batch_size=64, sequence_length=32)
    texts = TEXTS._replace(num_labels=5)
    peaks = [
        live_bytes(dry_run_job(tagger, texts, lowering, (micro_batch_choice(size),))).peak_bytes for size in (64, 4)
    ]
    assert peaks[0] > peaks[1]


@pytest.mark.parametrize("num_labels", [None, 3], ids=["language model", "classifier"])
def test_a_dry_run_of_a_recurrent_models_folder_does_not_read_it(num_labels, tmp_path):
    texts = TEXTS._replace(num_labels=num_labels)
    task = "classification" if num_labels else "language-modeling"
    new, saved = job(task=task), job(task=task, model=str(tmp_path))
    save_model(build_model(new, *texts.of_model), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    peaks = [live_bytes(dry_run_job(one, texts, CpuLowering(), WHOLE)).peak_bytes for one in (new, saved)]
    assert peaks[1] == peaks[0] > 0


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("lowering", [CpuLowering(), CudaLowering((8, 0))], ids=["cpu", "cuda"])
def test_adapters_copy_the_head_of_a_classifier(lowering, tmp_path):
    """Parameters of a dry run have no address, and peft copies the head with `copy.deepcopy`."""
    for label in "ab":
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.txt").write_text("a text", encoding="utf-8")
    model = {"architecture": "bert", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    fields = {"model": model, "task": "classification", "data": str(tmp_path), "allow": "lora", "batch_size": 2}
    job = Job.from_fields(fields | {"sequence_length": 8, "tokenizer": {"vocab_size": 300}})
    adapters = Choice(technique="lora", options={"rank": 2, "alpha": 4, "base": "kept"})
    choices = (adapters, micro_batch_choice(2))
    trace = dry_run_job(job, sketch_texts(job), lowering, choices, is_short=True)
    assert "optimizer" in trace.ops.phase


@pytest.mark.parametrize(
    ("batch_size", "micro_batch", "expected"),
    [(8, 8, 8), (8, 4, 8), (9, 4, 9), (12, 4, 8), (13, 4, 9), (7, 5, 7), (100, 30, 70)],
)
def test_the_dry_run_has_a_batch_of_two_whole_passes_that_ends_as_the_whole_one(batch_size, micro_batch, expected):
    assert dry_run_samples(batch_size, micro_batch) == expected


def test_a_smaller_last_pass_does_not_hide_that_a_whole_one_meets_gradients():
    """13 samples in passes of 4 leave a last pass of one sample. The peak is as for 12 samples."""
    peaks = []
    for batch_size in (12, 13):
        trace = dry_run_job(job(batch_size=batch_size), TEXTS, CpuLowering(), (micro_batch_choice(4),), is_short=True)
        peaks.append(live_bytes(trace).peak_bytes)
    assert peaks[1] >= peaks[0]


def test_a_short_dry_run_has_a_step_of_one_pass_and_one_of_two():
    trace = dry_run_job(job(), TEXTS, CpuLowering(), (micro_batch_choice(2),), is_short=True)
    passes = [0, 0, 0]
    for op, (step, phase) in enumerate(zip(trace.ops.step, trace.ops.phase, strict=True)):
        begins = phase == "forward" and trace.ops.phase[op - 1] != "forward"
        passes[step] += begins
    assert passes == [0, 1, 2]


def test_one_rank_alone_exchanges_nothing_and_two_do():
    texts = [dry_run_job(job(ranks=ranks), TEXTS, CpuLowering(), (micro_batch_choice(3),)).texts for ranks in (1, 2)]
    assert [any(text.startswith("c10d.") for text in one) for one in texts] == [False, True]


@pytest.mark.parametrize(("kind", "says_so"), [("cpu", True), ("cuda", False)])
def test_a_dry_run_counts_and_limits_nothing_and_can_reserve_memory_where_the_device_can(kind, says_so):
    backend = StageBackend(kind)
    use = backend.use()
    assert (use.used_bytes, use.peak_bytes, use.reserved_bytes, backend.baseline_bytes()) == (0, 0, 0, 0)
    assert (backend.reserved([8]) is not None) == says_so
    assert (backend.oom_family(MemoryError()), backend.is_nearly_full()) == (None, False)


def masked(lengths):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": mask * 7, "attention_mask": mask, "labels": torch.arange(len(lengths)) % 3}


@pytest.mark.parametrize(
    ("lengths", "dry_run"),
    [
        ([3, 4, 2, 6, 40, 3, 2, 4, 3], [2, 6, 40, 3]),
        ([3, 4, 2, 6, 4, 3, 2, 4, 50], [2, 6, 50]),
        ([40, 3, 2, 6, 4, 3, 2, 4, 20], [2, 6, 40, 3]),  # the last pass is smaller and stands for no other
        ([5] * 9, [5] * 5),
        ([40, 3, 2], [40, 3, 2]),
        ([3, 4, 2, 6], [3, 4, 2, 6]),
    ],
)
def test_of_a_recurrent_model_the_dry_run_has_the_two_passes_of_most_tokens_the_larger_last(lengths, dry_run):
    gru = nn.GRU(2, 2)
    cut = _telling_samples(masked(lengths), 2, gru, (micro_batch_choice(2),))
    assert cut["attention_mask"].sum(dim=1).tolist() == dry_run


def test_of_another_model_the_dry_run_has_the_first_samples_and_by_length_the_longest_and_the_fullest_pass():
    """Sorted by length, the passes have 30 and 29 tokens, 20 and 19, three times 18, and 1."""
    lengths, plain = [18, 20, 1, 30, 18, 19, 29, 18], nn.Linear(2, 2)
    by_length = (micro_batch_choice(2), Choice(technique="by_length"))
    cut = _telling_samples(masked(lengths), 2, plain, by_length[:1])
    assert cut["attention_mask"].sum(dim=1).tolist() == [18, 20, 1, 30]
    cut = _telling_samples(masked(lengths), 2, plain, by_length)
    assert cut["attention_mask"].sum(dim=1).tolist() == [30, 29, 18, 18, 18]
    unknown = {"input_ids": torch.zeros(9, 3)}
    assert len(_telling_samples(unknown, 2, nn.GRU(2, 2), by_length)["input_ids"]) == 5


def batch_of(num_labels=None, length=7, **changes):
    return _batch(job(**changes), TEXTS._replace(num_labels=num_labels), 4, length)


def test_rows_of_two_packed_texts_begin_anew_in_their_middle():
    batch = batch_of(data={"train": "nowhere.txt", "pack": True})
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]] * 4
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()


def test_streams_begin_anew_once_in_their_middle_and_have_slots():
    batch = batch_of(data={"train": "nowhere.txt", "order": "streams", "reset": "texts"})
    assert batch["resets"].nonzero()[:, 1].tolist() == [3] * 4
    assert (batch["slots"].tolist(), batch["windows"].tolist()) == ([0, 1, 2, 3], [1] * 4)


@pytest.mark.parametrize("stride", [None, 3])
def test_labels_of_windows_are_tensors_of_their_own(stride):
    batch = batch_of(data={"train": "nowhere.txt", "stride": stride})
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()


@pytest.mark.parametrize(("task", "shape"), [("classification", (4,)), ("token-classification", (4, 7))])
def test_a_text_has_a_label_or_each_of_its_tokens_has(task, shape):
    batch = batch_of(num_labels=3, task=task)
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert batch["labels"].shape == shape
    assert batch["labels"].max() < 3


def test_texts_by_themselves_have_a_mask():
    batch = batch_of(data={"train": "nowhere.txt", "on_the_fly": True, "long_texts": "truncate"})
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert batch["attention_mask"].all()


@pytest.mark.parametrize(("kept", "words"), [(5, 5), (1000, 300)])
def test_what_a_teacher_said_is_of_so_many_words_as_are_kept_and_there_are(kept, words):
    batch = batch_of(distill={"teacher": "nowhere", "cache": kept})
    assert batch[LOG_P].shape == batch[WORDS].shape == (4, 7, words)
    assert (batch[LOG_P].dtype, batch[WORDS].dtype) == (torch.float32, torch.int32)


def test_what_a_teacher_said_of_a_text_is_of_all_labels():
    batch = batch_of(num_labels=3, task="classification", distill={"teacher": "nowhere", "cache": 5})
    assert batch[LOG_P].shape == (4, 3)
    assert WORDS not in batch


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("lowering", "choice", "are_all_outside"),
    [
        (CpuLowering(), Choice(technique="parameter_offload", options={"gradients": True}), True),
        (CudaLowering((8, 6)), Choice(technique="layer_streaming", options={"blocks": "all"}), False),
    ],
    ids=["files", "the host"],
)
def test_parameters_that_are_kept_outside_are_never_on_the_device(lowering, choice, are_all_outside):
    """All parameters are in files, or both blocks (3,280 parameters each) are in host memory."""
    gpt2 = job(model={"architecture": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2})
    whole, outside = (dry_run_job(gpt2, TEXTS, lowering, (*WHOLE, *more)) for more in ((), (choice,)))

    def parameter_bytes(trace, on_host):
        storages = zip(trace.storages.num_bytes, trace.storages.category, trace.storages.on_host, strict=True)
        return sum(size for size, category, is_there in storages if category == "parameters" and is_there == on_host)

    all_bytes = parameter_bytes(whole, on_host=False)
    assert parameter_bytes(whole, on_host=True) == 0
    moved_bytes = all_bytes if are_all_outside else 2 * 4 * 3280
    assert parameter_bytes(outside, on_host=True) == moved_bytes
    assert parameter_bytes(outside, on_host=False) == all_bytes - moved_bytes
