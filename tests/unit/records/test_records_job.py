"""The values that job.yaml and --set accept, and an error that reports all faults at once."""

from pathlib import Path

import pytest

from plimsoll.errors import JobError
from plimsoll.records.job import Job

MINIMAL = "model: lstm\ndata: {train: a.txt}\n"
GIBIBYTE = 1024**3


def job_of(folder: Path, text: str, *changes: str) -> Job:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return Job.from_yaml(folder / "job.yaml", changes)


def faults_of(folder: Path, text: str, *changes: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        job_of(folder, text, *changes)
    return str(caught.value).splitlines()


def test_the_defaults(tmp_path: Path):
    job = job_of(tmp_path, MINIMAL)
    assert (job.batch_size, job.sequence_length, job.steps, job.seed) == (32, 256, 100, 0)
    assert (job.task, job.precision, job.device) == ("language-modeling", "fp32", "auto")
    assert (job.optimizer.name, job.optimizer.lr, job.checkpoint.every) == ("adamw", 3e-4, 50)
    assert (job.budget.device_bytes, job.budget.host_bytes) == (None, None)


@pytest.mark.parametrize(("precision", "own"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("auto", "fp32")])
def test_a_precision_that_is_left_to_the_plan_is_fp32_without_one(tmp_path: Path, precision: str, own: str):
    job = job_of(tmp_path, MINIMAL, f"precision={precision}")
    assert (job.precision, job.own_precision) == (precision, own)


def test_every_fault_is_told_at_once(tmp_path: Path):
    text = """
modle: lstm
data: {trian: a.txt}
batch_size: 0
seed: 1.5
precision: fp8
budget: {device: lots, hots: 1, host: 0}
checkpoint: {evry: 5}
optimizer: {lr: 0, schedule: cosin}
colour: blue
"""
    first, *faults = faults_of(tmp_path, text)
    assert first == f"{tmp_path / 'job.yaml'} cannot be used:"
    assert sorted(faults) == sorted(
        [
            "  model: missing; add it, see the example in README.md",
            "  modle: unknown field; did you mean `model`?",
            "  data.train: missing; add it, see the example in README.md",
            "  data.trian: unknown field; did you mean `train`?",
            "  batch_size: Input should be greater than or equal to 1 (got 0)",
            "  seed: Input should be a valid integer, got a number with a fractional part (got 1.5)",
            "  precision: Input should be 'fp32', 'bf16', 'fp16' or 'auto' (got 'fp8')",
            "  budget.device: cannot read 'lots' as a size in bytes: write a number and a unit (B, KiB, MiB, GiB, "
            "TiB, PiB, kB, MB, GB, TB or PB), for example 2GiB or 800MiB (got 'lots')",
            "  budget.hots: unknown field; did you mean `host`?",
            "  budget.host: a size must be more than 0 bytes, got 0: write for example 2GiB or 800MiB (got 0)",
            "  checkpoint.evry: unknown field; did you mean `every`?",
            "  optimizer.lr: Input should be greater than 0 (got 0)",
            "  optimizer.schedule: Input should be 'constant', 'linear' or 'cosine' (got 'cosin')",
            "  colour: unknown field; known here: model, task, data, tokenizer, embeddings, distill, sequence_length, "
            "batch_size, batch_tokens, optimizer, steps, precision, quantization_aware, allow, pin, device, ranks, "
            "budget, checkpoint, evaluate_every, seed",
        ]
    )


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("checkpoint: 5", "checkpoint: needs fields (every, keep), write for example `checkpoint: {every: ...}`"),
        ("budget:", "budget: needs fields (device, host), write for example `budget: {device: ...}`"),
        (
            "tokenizer: {vocab_size: 256}",
            "tokenizer.vocab_size: train: bpe needs at least 257 tokens, for all bytes and the end of a text: "
            "give more (got 256)",
        ),
        (
            "tokenizer: {train: words, vocab_size: 2}",
            "tokenizer.vocab_size: Input should be greater than or equal to 3 (got 2)",
        ),
        ("optimizer: {lr: .nan}", "optimizer.lr: Input should be a finite number (got nan)"),
        ("optimizer: {arguments: fast}", "optimizer.arguments: Input should be a valid dictionary (got 'fast')"),
        ("device: tpu", "device: Input should be 'auto', 'cpu' or 'cuda' (got 'tpu')"),
        ("seed: 9223372036854775808", f"seed: Input should be less than {2**63} (got {2**63})"),
        ("1: 2", "1: Keys should be strings (got 1)"),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_allowed(tmp_path: Path, line: str, fault: str):
    assert faults_of(tmp_path, MINIMAL + line)[1:] == [f"  {fault}"]


def test_a_value_of_no_allowed_type_is_one_fault(tmp_path: Path):
    assert faults_of(tmp_path, "model: 5\ndata: {train: a.txt}")[1:] == [
        "  model: Input should be a valid string (got 5) or Input should be a valid dictionary (got 5)"
    ]


@pytest.mark.parametrize("share", [0, 0.02, 0.999])
def test_a_share_of_the_data_can_be_held_out(tmp_path: Path, share: float):
    assert job_of(tmp_path, MINIMAL, f"data.validation={share}").data.validation == share


@pytest.mark.parametrize("share", ["1", "1.0", "-0.1", ".nan"])
def test_a_share_that_leaves_nothing_is_refused(tmp_path: Path, share: str):
    (_, fault) = faults_of(tmp_path, MINIMAL, f"data.validation={share}")
    assert fault.startswith("  data.validation: a held-out share is from 0 to less than 1, for example 0.02 (got ")


@pytest.mark.parametrize(
    ("budget", "device_bytes", "host_bytes"),
    [
        ("2GiB", 2 * GIBIBYTE, None),
        ("2147483648", 2 * GIBIBYTE, None),
        ("{device: 2GiB, host: 4GiB}", 2 * GIBIBYTE, 4 * GIBIBYTE),
        ("{host: 4GiB}", None, 4 * GIBIBYTE),
        ("{device_bytes: 2GiB}", 2 * GIBIBYTE, None),
        ("{device: null}", None, None),
    ],
)
def test_the_ways_to_write_a_budget(tmp_path: Path, budget: str, device_bytes: int | None, host_bytes: int | None):
    job = job_of(tmp_path, f"{MINIMAL}budget: {budget}")
    assert (job.budget.device_bytes, job.budget.host_bytes) == (device_bytes, host_bytes)


def test_short_forms_stand_for_the_field_that_matters(tmp_path: Path):
    short = job_of(tmp_path, "model: lstm\ndata: a.txt\ntokenizer: vocab\noptimizer: sgd\nbudget: 1GiB\n")
    full = job_of(
        tmp_path,
        "model: lstm\ndata: {train: a.txt}\ntokenizer: {path: vocab}\noptimizer: {name: sgd}\nbudget: {device: 1GiB}\n",
    )
    assert short == full


def test_what_plimsoll_does_not_know_of_an_optimizer_is_its_argument(tmp_path: Path):
    text = MINIMAL + "optimizer: {name: adamw, eps: 1e-8, betas: [0.9, 0.95], arguments: {foreach: false}}"
    job = job_of(tmp_path, text)
    assert job.optimizer.arguments == {"foreach": False, "eps": 1e-8, "betas": [0.9, 0.95]}


def test_relative_paths_are_taken_from_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somewhere")
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    text = "model: lstm\ndata: {train: [a/*.txt, ../b.txt, /c.txt, ~/d.txt], validation: e.txt}\ntokenizer: bpe.json"
    job = job_of(Path("jobs"), text)
    here = tmp_path / "jobs"
    assert job.data.train == (f"{here}/a/*.txt", f"{here}/../b.txt", "/c.txt", "/somewhere/d.txt")
    assert (job.data.validation, job.tokenizer.path) == (f"{here}/e.txt", f"{here}/bpe.json")


def test_fields_without_a_folder_keep_their_paths():
    assert Job.from_fields({"model": "lstm", "data": {"train": "a.txt"}}).data.train == "a.txt"


def test_checking_fields_does_not_change_them():
    fields = {"model": "lstm", "data": "a.txt", "optimizer": {"eps": 1}, "budget": {"device": 5}}
    Job.from_fields(fields, folder=Path("/data"))
    assert fields == {"model": "lstm", "data": "a.txt", "optimizer": {"eps": 1}, "budget": {"device": 5}}


@pytest.mark.parametrize(
    ("change", "where", "value"),
    [
        ("steps=5", "steps", 5),
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("optimizer.lr=2E+1", "optimizer.lr", 20.0),
        ("optimizer.eps=1e-8", "optimizer.arguments", {"eps": 1e-8}),
        ("optimizer=sgd", "optimizer.name", "sgd"),
        ("budget=3GiB", "budget.device_bytes", 3 * GIBIBYTE),
        ("budget.device=3GiB", "budget.device_bytes", 3 * GIBIBYTE),
        ("checkpoint.keep=1", "checkpoint.keep", 1),
        ("model={architecture: gpt2, resid_pdrop: 1e-1}", "model", {"architecture": "gpt2", "resid_pdrop": 0.1}),
        ("allow=[recut_batch_norm]", "allow", ("recut_batch_norm",)),
        ("allow=[adafactor, lora]", "allow", ("adafactor", "lora")),
        ("evaluate_every=", "evaluate_every", None),
        ("data.train=/x=y.txt", "data.train", "/x=y.txt"),
        ('data.train="/*.txt"', "data.train", "/*.txt"),
    ],
)
def test_a_change_sets_one_field(tmp_path: Path, change: str, where: str, value: object):
    place = job_of(tmp_path, MINIMAL, change)
    for name in where.split("."):
        place = getattr(place, name)
    assert place == value


def test_a_change_below_a_short_form_keeps_what_it_stands_for(tmp_path: Path):
    text = "model: lstm\ndata: a.txt\noptimizer: sgd\nbudget: 1GiB"
    job = job_of(tmp_path, text, "optimizer.lr=0.1", "budget.host=2GiB", "data.validation=0.5", "budget.device=3GiB")
    assert (job.optimizer.name, job.optimizer.lr) == ("sgd", 0.1)
    assert (job.budget.device_bytes, job.budget.host_bytes) == (3 * GIBIBYTE, 2 * GIBIBYTE)
    assert job.data.train == f"{tmp_path}/a.txt"


def test_a_change_replaces_the_full_name_of_a_budget_too(tmp_path: Path):
    job = job_of(tmp_path, MINIMAL + "budget: {device_bytes: 1}", "budget.device=2")
    assert job.budget.device_bytes == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps", "--set 'steps' is not of the form field=value: write for example --set optimizer.lr=1e-4"),
        ("=5", "--set '=5' is not of the form field=value: write for example --set optimizer.lr=1e-4"),
        ("data.=5", "--set 'data.=5' is not of the form field=value: write for example --set optimizer.lr=1e-4"),
        ("model.size=5", "--set 'model.size=5': `model` is 'lstm', which has no fields: set `model` as a whole"),
        (
            "data.train=*.txt",
            "--set 'data.train=*.txt': '*.txt' is not YAML: quote the value, as in 'data.train=\"*.txt\"'",
        ),
    ],
)
def test_a_change_that_cannot_be_made_is_explained(tmp_path: Path, change: str, message: str):
    assert faults_of(tmp_path, MINIMAL, change) == [message]


def test_an_unknown_field_in_a_change_is_shown_with_the_nearest(tmp_path: Path):
    assert faults_of(tmp_path, MINIMAL, "step=5", "checkpoint.every_steps=5")[1:] == [
        "  checkpoint.every_steps: unknown field; did you mean `every`?; this is from --set 'checkpoint.every_steps=5'",
        "  step: unknown field; did you mean `steps`?; this is from --set 'step=5'",
    ]


@pytest.mark.parametrize("change", ["optimizer.lr=-1", "optimizer={lr: -1}"])
def test_a_fault_is_blamed_on_the_change_it_is_from_and_on_no_other(tmp_path: Path, change: str):
    assert faults_of(tmp_path, MINIMAL + "seed: -1", "steps=5", "optimizer.lr=3", change)[1:] == [
        f"  optimizer.lr: Input should be greater than 0 (got -1); this is from --set {change!r}",
        "  seed: Input should be greater than or equal to 0 (got -1)",
    ]


def test_a_change_to_a_short_form_and_one_below_it(tmp_path: Path):
    job = job_of(tmp_path, MINIMAL, "budget=2GiB", "budget.device=1GiB", "data=b.txt", "data.validation=0.5")
    assert (job.budget.device_bytes, job.data.train) == (GIBIBYTE, f"{tmp_path}/b.txt")


def test_one_thing_that_is_allowed_needs_no_list(tmp_path: Path):
    assert job_of(tmp_path, MINIMAL, "allow=recut_batch_norm").allow == ("recut_batch_norm",)


def test_a_file_that_is_not_a_job(tmp_path: Path):
    with pytest.raises(JobError, match=r"there is no job file at .*job\.yaml: check the path"):
        Job.from_yaml(tmp_path / "job.yaml")
    with pytest.raises(
        JobError, match=r"is a folder, not a job file: give the path of the job file, such as .*job\.yaml"
    ):
        Job.from_yaml(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(JobError, match=r"is a run directory, not a job file: resume it \(`plimsoll train --resume"):
        Job.from_yaml(tmp_path)
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match="cannot be read as YAML"):
        Job.from_yaml(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "holds None, not fields like"), ("- a\n", r"holds \['a'\]"), ("a: [1", "cannot be read as YAML")],
)
def test_yaml_that_holds_no_fields(tmp_path: Path, text: str, why: str):
    with pytest.raises(JobError, match=why):
        job_of(tmp_path, text)


def test_a_job_written_down_is_the_same_job(tmp_path: Path):
    job = job_of(tmp_path, MINIMAL + "budget: 2GiB\noptimizer: {name: sgd, momentum: 0.9}\ndata: [a.txt, b.txt]\n")
    assert Job.from_fields(job.model_dump(mode="json"), folder=Path("/elsewhere")) == job


LABELLED = "model: lstm\ntask: classification\ndata: {train: a.jsonl, order: by_length}\n"


def test_a_step_of_so_many_tokens_has_as_many_samples_of_the_greatest_length(tmp_path: Path):
    job = job_of(tmp_path, LABELLED, "batch_tokens=8192", "sequence_length=512")
    assert (job.batch_size, job.batch_tokens) == (16, 8192)
    assert Job.from_json(job.to_json()) == job
    (fault,) = faults_of(tmp_path, LABELLED, "batch_tokens=8192", "batch_size=8")[1:]
    assert fault == (
        "  job: batch_tokens 8192 are 32 samples of sequence_length = 256 (more if samples are shorter), "
        "not batch_size 8: give one of them"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["batch_tokens=100"], "job: batch_tokens 100 needs data.order: by_length, and at least sequence_length = 256"),
        (["data.order=shuffle", "batch_tokens=1000"], "job: batch_tokens 1000 needs data.order: by_length"),
        (["data.pack=true"], "job: data.pack joins texts into rows, but classification takes them one by one"),
        (["data.pack=true", "data.stride=8"], "data: pack: true puts whole texts into rows: leave out borders, stride"),
        (["data.on_the_fly=true"], "data: on_the_fly: true cannot cut texts into windows, because text lengths are"),
        (
            ["task=token-classification", "data.order=shuffle", "data.borders=sentence"],
            "job: data.borders 'sentence' cannot be used with tagged words, which are in one column",
        ),
        (
            ["task=token-classification", "data.on_the_fly=true", "data.long_texts=stop"],
            "job: data.on_the_fly True cannot be used with tagged words",
        ),
        (
            ["task=token-classification", "data.text=[a, b]"],
            "job: data.text ('a', 'b') cannot be used with tagged words",
        ),
        (
            ["task=token-classification", "data.augment={token_function: 'a:b'}"],
            "job: data.augment.token_function 'a:b'",
        ),
        (["data.stride=300"], "job: data.stride 300 would leave out tokens between windows of sequence_length 256"),
        (["data.stride=8", "data.borders=sentence"], "data: stride 8 is for windows that do not end at borders"),
        (["data.augment={mask: 0.1}"], "job: data.augment.mask 0.1 needs a tokenizer with a mask token"),
        (["data.augment={delete_word: 0.1}"], "data: augment changes words, which needs texts that are tokenized"),
        (
            ["tokenizer.min_count=2"],
            "tokenizer: min_count needs train: words: leave it out, or add `train",
        ),
        (["tokenizer=a.json", "tokenizer.lowercase=true"], "tokenizer: lowercase needs train: words: leave it out"),
        (
            ["tokenizer=/a.json", "tokenizer.train=words"],
            "tokenizer: train: words and path '/a.json'",
        ),
        (["data.workers=true"], "data.workers: "),
        (["data.validation=''"], "data.validation: it is empty: give a path, a share"),
        (
            ["task=language-modeling", "data.order=shuffle", "data.long_texts=stop"],
            "job: data.long_texts 'stop' is for texts that are samples, but language-modeling cuts windows",
        ),
        (["task=language-modeling"], "job: data.order: by_length has no effect, because all windows"),
        (
            ["task=language-modeling", "data.order=shuffle", "data.label=y"],
            "job: data.label names a column of classes, but the task is language-modeling: leave it out",
        ),
        (["data.order=streams"], "job: data.order: streams is for language-modeling, and the task is classification"),
        (["data.order=streams", "data.stride=8"], "data: order: streams reads all texts concatenated, window after"),
        (["data.order=streams", "data.pack=true"], "data: order: streams reads all texts concatenated"),
        (["data.order=streams", "data.borders=sentence"], "data: order: streams reads all texts concatenated"),
        (["data.reset=texts"], "data: reset 'texts' needs order: streams, and order is"),
        (["data.order=streams", "data.reset=lines"], "data.reset: Input should be 'texts'"),
    ],
)
def test_what_of_the_data_contradicts_itself_is_told(tmp_path: Path, changes: list[str], message: str):
    faults = faults_of(tmp_path, LABELLED, *changes)
    assert faults[1].strip().startswith(message), faults


def test_a_share_in_quotes_is_a_share(tmp_path: Path):
    assert job_of(tmp_path, MINIMAL, "data.validation='0.1'").data.validation == 0.1


def test_a_tokenizer_of_words_may_be_small(tmp_path: Path):
    fields = {"train": "words", "vocab_size": 3, "min_count": 2, "lowercase": True}
    job = job_of(tmp_path, f"{MINIMAL}tokenizer: {fields}")
    assert job.tokenizer.model_dump() == {"path": None, "special_tokens": True, **fields}
    assert Job.from_fields(job.model_dump(mode="json"), folder=tmp_path) == job


def test_a_name_on_the_hub_is_no_path(tmp_path: Path):
    assert job_of(tmp_path, MINIMAL, "data.train=hf:imdb").data.sources == ("hf:imdb",)
    assert job_of(tmp_path, MINIMAL).data.sources == (str(tmp_path / "a.txt"),)


def test_a_path_stands_for_word_vectors_and_is_taken_from_the_folder_of_the_job(tmp_path):
    (tmp_path / "job.yaml").write_text("model: gru\ndata: a.txt\nembeddings: glove.zip/glove.txt\n")
    job = Job.from_yaml(tmp_path / "job.yaml")
    assert job.embeddings is not None
    assert job.embeddings.path == str(tmp_path / "glove.zip" / "glove.txt")
    assert (job.embeddings.trainable, job.embeddings.missing) == (False, "normal")
    changed = Job.from_yaml(tmp_path / "job.yaml", ("embeddings.trainable=true", "embeddings.missing=zeros"))
    assert changed.embeddings == job.embeddings.model_copy(update={"trainable": True, "missing": "zeros"})
    with pytest.raises(JobError, match=r"embeddings.missing: .*'zeros', 'mean' or 'normal' \(got 'none'\)"):
        Job.from_yaml(tmp_path / "job.yaml", ("embeddings.missing=none",))


def test_pins_are_read_as_on_the_command_line():
    fields = {"model": "lstm", "data": "a.txt"}
    assert Job.from_fields(fields | {"pin": "heap"}).pin == ("heap",)
    assert Job.from_fields(fields | {"pin": ["micro_batch=4", "checkpointing(blocks=0-3)"]}).pin[1].endswith("0-3)")
    with pytest.raises(JobError, match=r"pin: cannot read '=4' as a choice: write a technique"):
        Job.from_fields(fields | {"pin": ["=4"]})


def test_no_rank_is_without_a_sample(tmp_path: Path):
    assert job_of(tmp_path, MINIMAL, "ranks=4", "batch_size=4").ranks == 4
    (fault,) = faults_of(tmp_path, MINIMAL, "ranks=5", "batch_size=4")[1:]
    assert fault == "  job: ranks 5 exceeds batch_size 4: give at most one rank per sample"


@pytest.mark.parametrize("written", ["", "budget: 1GiB\n", "budget: {device_bytes: 1, host: 7}\n", "budget: null\n"])
def test_a_budget_in_bytes_takes_the_place_of_what_is_written(tmp_path, written):
    (tmp_path / "job.yaml").write_text(MINIMAL + written)
    budget = Job.from_yaml(tmp_path / "job.yaml", ("budget.device=5",), budget_bytes=3).budget
    assert (budget.device_bytes, budget.host_bytes) == (3, 7 if "host" in written else None)


def test_a_job_file_is_read_and_texts_make_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("model: lstm\ndata: {train: a.txt}\n")
    of_file = Job.from_file_or_texts(["job.yaml"], ("data.unit=line",))
    assert (of_file.model, of_file.data.unit, of_file.data.sources) == ("lstm", "line", (str(tmp_path / "a.txt"),))
    of_texts = Job.from_file_or_texts(["a.txt", "b", "hf:name"], ("data.unit=line", "sequence_length=64"))
    assert of_texts.data.sources == (str(tmp_path / "a.txt"), str(tmp_path / "b"), "hf:name")
    assert (of_texts.data.unit, of_texts.sequence_length) == ("line", 64)
