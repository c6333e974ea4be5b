"""The loss of a job with a teacher: the place of its weights, refusals, and steps that can be undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from distillations import KINDS, SAMPLES, batch_of, largest_difference, model_of, task_of
from plimsoll.data.quick_facts import TextSketch
from plimsoll.errors import JobError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.models.build import loss_of, save_model
from plimsoll.models.distillation.chunked import LossWeights
from plimsoll.models.distillation.loss import Distillation
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.planning.teacher_loss import (
    form_of,
    loss_for,
    require_alike,
    require_folder,
    require_teacher,
    sketched_loss,
)
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.trace import Trace
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques.mechanisms.frozen_base import CodedLinear

LSTM = {"architecture": "lstm", "embedding_size": 8, "hidden_size": 8}
TEXTS = {"language-modeling": TextSketch(50, None, 0), "classification": TextSketch(50, 3, 0)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind in KINDS:
        made[kind] = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        save_model(model_of(kind, 1), made[kind])
    return made


def job_of(folder: Path, task: str = "language-modeling", **fields: Any) -> Job:
    distill = {"teacher": str(folder)} | fields.pop("distill", {})
    sizes = {"sequence_length": 16, "batch_size": 4}
    return Job.from_fields({"model": LSTM, "data": "a.txt", "task": task, "distill": distill} | sizes | fields)


def teacher_of(job: Job) -> nn.Module:
    loss = loss_for(job, TEXTS[job.task], "cpu")
    assert isinstance(loss, Distillation)
    assert loss.teacher is not None
    return loss.teacher


def test_a_job_without_a_teacher_has_its_tasks_loss() -> None:
    job = Job.from_fields({"model": LSTM, "data": "a.txt"})
    own = loss_of("language-modeling")[0]
    assert loss_for(job, TEXTS["language-modeling"], "cpu") is own
    assert sketched_loss(job, TEXTS["language-modeling"], nn.Linear(1, 1)) is own
    require_folder(job)


def test_weights_are_in_files_on_the_cpu_and_in_memory_on_a_gpu(folders: dict[str, Path]) -> None:
    job = job_of(folders["gpt2"])
    assert (form_of(job, "cpu"), form_of(job, "cuda:0")) == ("mapped", "memory")
    assert form_of(job_of(folders["gpt2"], distill={"form": "int8"}), "cuda") == "int8"
    with pytest.raises(JobError, match="mapped leaves weights in files, which a GPU cannot read"):
        form_of(job_of(folders["gpt2"], distill={"form": "mapped"}), "cuda")
    assert not any(one.untyped_storage().resizable() for one in teacher_of(job).parameters())


def test_a_teacher_that_was_asked_before_is_not_loaded(tmp_path: Path) -> None:
    job = job_of(tmp_path, distill={"cache": 7, "temperature": 3.0, "hard": 0.25})
    loss = loss_for(job, TEXTS["language-modeling"], "cpu")
    assert isinstance(loss, Distillation)
    assert loss.teacher is None
    assert (loss._num_words, loss._loss_weights, loss._hidden) == (50, LossWeights(3.0, 0.25), 0.0)


def test_a_teacher_that_is_there_teaches_as_the_job_says(folders: dict[str, Path]) -> None:
    job = job_of(folders["gpt2"], distill={"temperature": 3.0, "hard": 0.25, "hidden": 0.5})
    for loss in (
        loss_for(job, TEXTS["language-modeling"], "cpu"),
        sketched_loss(job, TEXTS["language-modeling"], model_of("gpt2", 0)),
    ):
        assert isinstance(loss, Distillation)
        assert isinstance(loss.teacher, nn.Module)
        assert (loss._num_words, loss._loss_weights, loss._hidden) == (0, LossWeights(3.0, 0.25), 0.5)


def write_tokenizer(path: Path, *words: str) -> None:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "</s>", *words])}
    Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")).save(str(path))


def test_a_teacher_reads_the_tokens_of_the_job_where_its_folder_says_which(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "teacher"
    save_model(model_of("gpt2", 1), folder)
    # Without it transformers would use GPT-2's tokenizer class, which adds a token.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "same").mkdir()
    write_tokenizer(tmp_path / "same" / "tokenizer.json", "a", "b")
    job = job_of(folder, tokenizer={"path": str(tmp_path / "same")})
    require_teacher(job, TEXTS["language-modeling"])  # a teacher may be saved without its tokenizer
    write_tokenizer(folder / "tokenizer.json", "a", "b")
    require_teacher(job, TEXTS["language-modeling"])
    write_tokenizer(folder / "tokenizer.json", "b", "a")
    with pytest.raises(JobError, match="token"):
        require_teacher(job, TEXTS["language-modeling"])
    require_teacher(job_of(folder), TEXTS["language-modeling"])  # for a tokenizer that does not exist yet


def test_packed_rows_need_a_teacher_that_can_tell_texts_apart(folders: dict[str, Path]) -> None:
    data = {"train": "a.txt", "unit": "line", "pack": True}
    with pytest.raises(JobError, match="data.pack: the teacher of distill.teacher: .*leave data.pack out, or give"):
        teacher_of(job_of(folders["lstm"], data=data))
    assert isinstance(teacher_of(job_of(folders["gpt2"], data=data)), nn.Module)
    assert isinstance(teacher_of(job_of(folders["lstm"])), nn.Module)


@pytest.mark.parametrize("kind", ["gpt2", "bert classifier"])
def test_codes_are_within_half_a_step_of_the_weights(folders: dict[str, Path], kind: str) -> None:
    """This holds for `Conv1D` and `nn.Linear`; weights tied to the embeddings stay unchanged."""
    job = job_of(folders[kind], task_of(kind), distill={"form": "int8"})
    coded, dense = teacher_of(job), dict(model_of(kind, 1).named_modules())
    names = [name for name, module in coded.named_modules() if isinstance(module, CodedLinear)]
    assert len(names) == (8 if kind == "gpt2" else 14)
    for name in names:
        layer, own = coded.get_submodule(name), dense[name].weight
        step = layer.scale if kind != "gpt2" else layer.scale.t()
        assert ((layer.weight - own).abs() <= step * 0.5001).all()
    assert not any(one.requires_grad for one in coded.parameters())


def test_codes_are_refused_where_there_is_nothing_to_be_coded(folders: dict[str, Path]) -> None:
    save_model(model_of("lstm", 1, tie_weights=True), folders["lstm"] / "tied")
    with pytest.raises(JobError, match="int8 finds no linear layers in a RecurrentLanguageModel"):
        teacher_of(job_of(folders["lstm"] / "tied", distill={"form": "int8"}))


def test_what_does_not_fit_is_said_before_anything_is_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(JobError, match="distill.teacher: there is no model in"):
        require_folder(job_of(tmp_path))
    require_folder(job_of(folders["gpt2"]))
    with pytest.raises(JobError, match="50 token embeddings, but the tokenizer has 40"):
        require_teacher(job_of(folders["lstm"]), TextSketch(40, None, 0))


def test_hidden_states_need_layers_that_show_them_and_one_size(folders: dict[str, Path]) -> None:
    hidden = {"distill": {"hidden": 1.0}}
    with pytest.raises(JobError, match="which a recurrent teacher .* does not return"):
        require_teacher(job_of(folders["lstm"], **hidden), TEXTS["language-modeling"])
    job = job_of(folders["gpt2"], **hidden)
    teacher = require_teacher(job, TEXTS["language-modeling"])
    require_alike(job, model_of("gpt2", 0), teacher)
    with pytest.raises(JobError, match="have 16 numbers in the teacher and 8 in the model"):
        require_alike(job, model_of("gpt2", 0, width=8), teacher)
    with pytest.raises(JobError, match="a RecurrentLanguageModel does not return"):
        require_alike(job, model_of("lstm", 0), teacher)
    require_alike(job_of(folders["gpt2"]), model_of("gpt2", 0, width=8), teacher)


# -- in a step ---------------------------------------------------------------------------------------------------------


def step_with(kind: str, *sizes: int, choices: tuple[Choice, ...] = (), **fields: Any) -> TrainStep:
    teacher = model_of(kind, 1, **fields).eval().requires_grad_(False)
    student, loss = model_of(kind, 0, **fields).train(), Distillation(teacher, task_of(kind), LossWeights(2.0, 0.5))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, eps=1e-3)
    fallbacks = [[micro_batch_choice(size), *choices] for size in sizes]
    return TrainStep(student, optimizer, loss, units=loss_of(task_of(kind))[1], fallbacks=fallbacks)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_out_of_memory_in_a_step_changes_nothing(kind: str, phase: str) -> None:
    """A smaller micro-batch gives the same bits as without the error, and an update is repeated unchanged."""
    quiet, disturbed, batch = step_with(kind, 3 if phase == "optimizer" else 2), step_with(kind, 3, 2), batch_of(kind)
    with armed(phase, 1):
        first = disturbed(batch)
    assert len(first.oom_events) == 1
    assert [first.loss, disturbed(batch).loss] == [quiet(batch).loss, quiet(batch).loss]
    models = [step.workload.model.parameters() for step in (quiet, disturbed)]
    assert all(torch.equal(own, other) for own, other in zip(*models, strict=True))
    teacher = disturbed.workload.loss.teacher  # type: ignore[attr-defined]
    teachers = zip(teacher.parameters(), model_of(kind, 1).parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in teachers)


CHOICES = {
    "gpt2": [
        Choice(technique="checkpointing", options={"blocks": "all"}),
        Choice(technique="chunked_loss", options={"chunk_tokens": 4}),
        Choice(technique="parameter_offload", options={"gradients": True}),
        Choice(technique="optimizer_in_backward"),
        Choice(technique="activation_offload", options={"to": "disk"}),
        Choice(technique="autocast", options={"dtype": "bf16"}),
    ],
    "lstm": [Choice(technique="time_segments", options={"steps": 3})],
    "lstm classifier": [
        Choice(technique="time_segments", options={"steps": 3}),
        Choice(technique="packed_stretches"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "choice"), [(kind, one) for kind, choices in CHOICES.items() for one in choices], ids=str
)
def test_techniques_go_with_a_teacher(kind: str, choice: Choice) -> None:
    batch, states = batch_of(kind), []
    fields = {"vocab_size": 1024} if choice.technique == "chunked_loss" else {}
    for choices in ((), (choice,)):
        step = step_with(kind, SAMPLES, choices=choices, **fields)
        step(batch)
        step(batch)
        step.close()
        states.append(dict(step.workload.model.state_dict()))
    assert largest_difference(*states) < (0.1 if choice.technique == "autocast" else 1e-4)


# -- in a dry run ----------------------------------------------------------------------------------------------------


def traced(job: Job, lowering: Any) -> Trace:
    return dry_run_job(job, TEXTS[job.task], lowering, (micro_batch_choice(2),), is_short=True)


def teachers_bytes(trace: Trace) -> tuple[int, int]:
    """Return the bytes of the teacher's parameters on the device and in host memory."""
    table, found = trace.storages, [0, 0]
    for number, name in enumerate(table.name):
        if trace.texts[name].startswith("teacher.") and table.category[number] == "parameters":
            found[table.on_host[number]] += table.num_bytes[number]
    return found[0], found[1]


@pytest.mark.parametrize("lowering", [CpuLowering(), CudaLowering((8, 6))], ids=["cpu", "cuda"])
def test_a_dry_run_counts_the_teacher_where_it_is(folders: dict[str, Path], lowering: Any) -> None:
    num_bytes = sum(one.numel() * 4 for one in model_of("gpt2", 1).parameters())
    in_memory = teachers_bytes(traced(job_of(folders["gpt2"], distill={"form": "memory"}), lowering))
    assert in_memory == (num_bytes, 0)
    coded, _ = teachers_bytes(traced(job_of(folders["gpt2"], distill={"form": "int8"}), lowering))
    assert 0 < coded < num_bytes
    if lowering.kind == "cpu":
        assert teachers_bytes(traced(job_of(folders["gpt2"]), lowering)) == (0, num_bytes)


def test_a_mapped_teacher_takes_no_more_than_it_computes_with(folders: dict[str, Path]) -> None:
    mapped, in_memory = (
        live_bytes(traced(job_of(folders["gpt2"], distill={"form": form}), CpuLowering())).peak_bytes
        for form in ("mapped", "memory")
    )
    assert in_memory - mapped == sum(one.numel() * 4 for one in model_of("gpt2", 1).parameters())
