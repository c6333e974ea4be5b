"""Creation and evaluation of smaller models, in the processes that ``plimsoll shrink`` starts.

`Workshop` makes models. For each, it loads the original again, applies a chain of methods
(`plimsoll.compression.methods`), evaluates the result and writes a folder. `measured` measures inference in a separate
process, so that the peak includes no other model. `plimsoll.compression.search`, which holds no tensors, calls both.

Does NOT search and does not train.
"""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plimsoll.compression.evidence import Evidence, JobEvidence, TextEvidence
from plimsoll.compression.importance import is_meta
from plimsoll.compression.methods import SHRINKERS, Bundle, Calibration, Shrinker
from plimsoll.compression.saving import form_of, save_bundle
from plimsoll.compression.worker import Made, Offer, ShrinkRequest, Source
from plimsoll.data.quick_facts import sketch_texts
from plimsoll.data.tokens.model_tokenizer import load_model_tokenizer
from plimsoll.device.base import backend_for
from plimsoll.device.cpu.data_limit import set_up_heap
from plimsoll.errors import DataError, InputError, PlimsollError, WeightsError
from plimsoll.inference.dry_run import Compute, dry_run_inference
from plimsoll.inference.model import import_first, load_for_inference, stored_dtype
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.models.hugging_face import MODEL_FAULTS
from plimsoll.models.inference import InferenceTask
from plimsoll.models.loading import sketch_checkpoint
from plimsoll.models.recurrent.skeleton import recurrent_fields, recurrent_skeleton
from plimsoll.planning.baseline import StartedBaseline
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.planning.targets import find_target
from plimsoll.processes.children import ending_with_this
from plimsoll.records.allocator import TIGHT_HEAP
from plimsoll.records.distill import DistillSource
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.records.shrink import METHODS, InferenceCost, Quality, check_method
from plimsoll.step.oom_boundary import fitting
from plimsoll.weights.loading import open_checkpoint
from plimsoll.weights.parts import cast_saved, model_bytes, with_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PASSES_MEASURED = 8


@dataclass
class Workshop:
    """Maker of smaller models from the original in ``folder``. Each model is evaluated on the data of ``evidence``."""

    folder: Path
    evidence: Evidence
    _training_baseline: Estimate | None = None
    _sketched: Bundle | None = None

    def offers(self) -> tuple[Offer, ...]:
        """Return the choices of each method for the original, or the reason why a method has none."""
        bundle = self._bundle(self.folder, None)
        found = []
        for method in SHRINKERS.values():
            choices = self.evidence.cannot_judge(method.name) or method.choices(bundle)
            offered = {"reason": choices} if isinstance(choices, str) else {"choices": choices}
            found.append(Offer.model_validate({"method": method.name, "saves": method.saves} | offered))
        return tuple(found)

    def check(self, chain: Sequence[Choice]) -> None:
        """Raise an error if the original's configuration shows that a chain is impossible.

        This reads neither weights nor texts, so a method may still refuse later because of their content.

        Raises:
            WeightsError: if a method refuses its choice; the message gives the reason.
        """
        bundle = Bundle(self._bare(), self._tokenizer(self.folder))
        for choice in chain:
            self._apply(bundle, choice, Calibration())

    def weight_bytes(self, chain: Sequence[Choice]) -> int | None:
        """Return the bytes of the weights that a chain would leave; ``None`` if a method refuses its choice.

        The chain is applied on the meta device, so no model is made.
        """
        bundle, is_stored = self._sketch(), False
        try:
            for choice in chain:
                if METHODS[choice.technique].stage == "values" and not is_stored:
                    cast_saved(bundle.model, stored_dtype(self.folder))
                    is_stored = True
                counts = "corpus" in _method(choice.technique).needs(choice)
                self._apply(bundle, choice, self._calibration(choice, None) if counts else Calibration())
        except InputError:
            return None
        if not is_stored:
            cast_saved(bundle.model, stored_dtype(self.folder))
        return model_bytes(bundle.model)

    def make(self, source: Source, chain: Sequence[Choice], target: Path | None) -> Made:
        """Make a smaller model from ``source``, evaluate it and save it.

        Args:
            source: the original, or a model made from it.
            chain: choices in the order of application.
            target: an empty folder for the model; ``None`` for a temporary one.

        Raises:
            InputError: if a method refuses its choice, or the model cannot be evaluated.
            OutOfMemoryError: if memory runs out.
        """
        return fitting(lambda: self._made(source, chain, target), backend_for("cpu"), "making a smaller model")

    def _made(self, source: Source, chain: Sequence[Choice], target: Path | None) -> Made:
        bundle = self._bundle(Path(source.folder), source.tokenizer)
        with TemporaryDirectory(prefix="plimsoll-") as place:
            tokenizer = None if source.tokenizer is None else Path(source.tokenizer)
            dtype, is_stored = stored_dtype(Path(source.folder)), False
            for number, choice in enumerate(chain):
                if METHODS[choice.technique].stage == "values" and not is_stored:
                    cast_saved(bundle.model, dtype)
                    is_stored = True
                before = bundle.tokenizer
                self._apply(bundle, choice, self._calibration(choice, tokenizer))
                if bundle.tokenizer is not before:
                    assert bundle.tokenizer is not None
                    tokenizer = Path(place) / f"tokenizer-{number}"
                    bundle.tokenizer.save_pretrained(tokenizer)
            if not is_stored:
                cast_saved(bundle.model, dtype)
            bundle.model.eval()
            quality = self._quality(bundle.model, tokenizer, chain)
            folder = target or Path(place) / "model"
            folder.mkdir(parents=True, exist_ok=True)
            save_bundle(bundle, folder, Path(source.folder))
            return Made(
                form=form_of(bundle.model),
                file_bytes=_file_bytes(folder),
                weight_bytes=model_bytes(bundle.model),
                quality=quality,
                has_own_tokenizer=tokenizer is not None,
            )

    def predicted(self, folder: Path, cost: InferenceCost) -> Estimate | None:
        """Predict the peak memory of the inference passes that `measured` ran.

        Return ``None`` if the model does not support a dry run.

        Args:
            folder: the folder of the model.
            cost: the result of `measured`. Its batch shape, and the memory used before the passes, are read.
        """
        target = find_target("cpu", None, lambda: _known(cost.baseline_bytes))
        try:
            model = load_for_inference(folder, self.evidence.head, None, "cpu")
            trace = dry_run_inference(
                model,
                _compute_of(self.evidence.inference(folder)),
                CpuLowering(),
                rows=cost.rows,
                longest_tokens=cost.longest_tokens,
            )
        except InputError:
            return None
        return target.count(trace, heap=TIGHT_HEAP).peak  # `measured` uses the same heap

    def predicted_training(self, source: Source, teacher: str | None) -> Estimate | None:
        """Predict the peak memory of a training step of ``source`` with the whole batch as one micro-batch.

        Return ``None`` if the evaluation data belong to no job, or if the model does not support a dry run.

        Args:
            source: the model to train.
            teacher: the folder of a model to distill from; ``None`` for training on labels only.
        """
        if not isinstance(self.evidence, JobEvidence):
            return None
        job = self.evidence.job_for(Path(source.folder), None if source.tokenizer is None else Path(source.tokenizer))
        job = job.model_copy(update={"distill": None if teacher is None else DistillSource(teacher=teacher)})
        if self._training_baseline is None:
            with StartedBaseline(job) as started:
                self._training_baseline = started.wait()
        baseline = self._training_baseline
        target = find_target("cpu", None, lambda: baseline)
        try:
            trace = dry_run_job(job, sketch_texts(job), target.lowering(), (micro_batch_choice(job.batch_size),))
        except InputError:
            return None
        return target.count(trace).peak

    def _sketch(self) -> Bundle:
        """Return a new copy of the original on the meta device. Only the first call reads the folder."""
        if self._sketched is None:
            given = self._bundle(self.folder, None)
            self._sketched = Bundle(_on_meta(given.model), given.tokenizer)
        return Bundle(copy.deepcopy(self._sketched.model), self._sketched.tokenizer)

    def _bare(self) -> nn.Module:
        """Build the original on the meta device. Only the sizes of its weights are read."""
        fields = recurrent_fields(self.folder)
        if fields is not None:
            return recurrent_skeleton(open_checkpoint(self.folder), fields, None, {}).model
        skeleton, _ = sketch_checkpoint(self.folder, head=self.evidence.head)
        bare: nn.Module = skeleton.model
        return bare

    def _bundle(self, folder: Path, tokenizer: str | None) -> Bundle:
        own = None if tokenizer is None else Path(tokenizer)
        return Bundle(self.evidence.load(folder, own), self._tokenizer(own or folder))

    def _tokenizer(self, folder: Path) -> PreTrainedTokenizerFast | None:
        try:
            return load_model_tokenizer(folder)
        except DataError:  # user code may use another tokenizer
            return None

    def _calibration(self, choice: Choice, tokenizer: Path | None) -> Calibration:
        return self.evidence.calibration(tokenizer) if _method(choice.technique).needs(choice) else Calibration()

    def _apply(self, bundle: Bundle, choice: Choice, calibration: Calibration) -> None:
        method = _method(choice.technique)
        fault = method.refusal(bundle, choice)
        if fault is not None:
            raise WeightsError(
                f"{choice.in_full} cannot be used for {self.folder} ({fault}): leave it out, or change it"
            )
        if not is_meta(bundle.model) and "corpus" in method.needs(choice) and calibration.token_counts is None:
            raise WeightsError(
                f"{choice.in_full} needs token counts of the corpus, which do not exist with data.on_the_fly: "
                "leave out data.on_the_fly"
            )
        method.shrink(bundle, choice, calibration)

    def _quality(self, model: nn.Module, tokenizer: Path | None, chain: Sequence[Choice]) -> Quality:
        try:
            return self.evidence.quality(model, tokenizer)
        except PlimsollError:
            raise
        except MODEL_FAULTS as error:
            name = " > ".join(map(str, chain)) or "the original"
            raise InputError(
                f"{self.folder} after {name} fails on the evaluation data ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}): exclude the method that made it with --forbid"
            ) from error


def evidence_of(request: ShrinkRequest) -> Evidence:
    """Return the evaluation data of a request."""
    if request.job is not None:
        return JobEvidence(request.job, Path(request.cache), request.most_samples)
    assert request.data is not None
    return TextEvidence(
        Path(request.folder), Path(request.data), request.columns, request.has_header, request.most_samples
    )


def answers_of(request: ShrinkRequest) -> dict[str, Callable[..., Any]]:
    """Return the function that answers each question of a `plimsoll.compression.worker.ShrinkProcess`, by its name.

    The functions take and return JSON values.
    """
    workshop = Workshop(Path(request.folder), evidence_of(request))

    def chain_of(given: list[dict[str, Any]]) -> tuple[Choice, ...]:
        return tuple(Choice.model_validate(one) for one in given)

    def make(source: dict[str, Any], chain: list[dict[str, Any]], target: str) -> dict[str, Any]:
        return workshop.make(Source.model_validate(source), chain_of(chain), Path(target)).model_dump()

    def measured_apart(source: dict[str, Any]) -> dict[str, Any]:
        model = Source.model_validate(source)
        cost = _measured_apart(request, model)
        predicted = workshop.predicted(Path(model.folder), cost)
        return cost.model_copy(update={"predicted": predicted}).model_dump()

    def predicted_training(source: dict[str, Any], teacher: str | None) -> dict[str, Any] | None:
        found = workshop.predicted_training(Source.model_validate(source), teacher)
        return None if found is None else found.model_dump()

    return {
        "offers": lambda: [one.model_dump() for one in workshop.offers()],
        "check": lambda chain: workshop.check(chain_of(chain)),
        "weight_bytes": lambda chain: workshop.weight_bytes(chain_of(chain)),
        "make": make,
        "measured": measured_apart,
        "predicted_training": predicted_training,
    }


def _measured_apart(request: ShrinkRequest, source: Source) -> InferenceCost:
    """Measure the peak memory and the time of inference with a model, in a new process; see `measured`."""
    command = [sys.executable, "-m", "plimsoll", "measure-worker"]
    asked = json.dumps({"request": request.to_json(), "source": source.model_dump()})
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, env=ending_with_this())
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError(
            f"inference with {source.folder} fails ({last}): exclude the method that made it with --forbid"
        )
    return InferenceCost.model_validate_json(done.stdout.strip().splitlines()[-1])


def measured(folder: Path, evidence: Evidence, tokenizer: Path | None, original: Path) -> InferenceCost:
    """Measure the peak memory and the time of inference on the first batches of the evaluation data.

    Call this in a fresh process. The peak is measured with this model alone, in a heap that returns freed memory to the
    system. An ordinary heap retains some freed memory, and this amount varies by some 20 MiB. Then the original is
    loaded as well, and the passes of both are timed alternately, so that other processes slow both. For the timing, the
    heap keeps freed memory.

    Args:
        folder: the model to measure.
        evidence: the evaluation data.
        tokenizer: the folder of the model's tokenizer; ``None`` for the original's.
        original: the folder of the original.
    """
    backend = backend_for("cpu")
    batches = list(itertools.islice(evidence.batches(tokenizer), _PASSES_MEASURED))
    compute = _compute_of(evidence.inference(folder))
    import_first(folder, evidence.head)
    set_up_heap(TIGHT_HEAP.mmap_threshold_bytes)
    backend.baseline_bytes()  # starts the thread pools
    baseline_bytes = backend.use().used_bytes
    backend.reset_peak()
    model = load_for_inference(folder, evidence.head, None, "cpu")
    with torch.inference_mode():
        for batch in batches:
            compute(model, batch)
        peak_bytes = backend.use().peak_bytes
        set_up_heap(None)
        first = load_for_inference(original, evidence.head, None, "cpu")
        of_original = list(itertools.islice(evidence.batches(None), len(batches)))
        pairs = [
            (_row_seconds(compute, model, batch), _row_seconds(compute, first, other))
            for batch, other in zip(batches, of_original, strict=False)
        ]
    return InferenceCost(
        rows=max(len(batch["input_ids"]) for batch in batches),
        longest_tokens=max(batch["input_ids"].shape[1] for batch in batches),
        peak_bytes=peak_bytes,
        baseline_bytes=baseline_bytes,
        row_seconds=median(mine for mine, _ in pairs),
        speed=median(its / mine for mine, its in pairs),
    )


def _row_seconds(compute: Compute, model: nn.Module, batch: dict[str, Tensor]) -> float:
    """Return the seconds per row of a batch, from the faster of two passes: caches may be cold in the first."""
    found = []
    for _ in range(2):
        began = time.perf_counter()
        compute(model, batch)
        found.append(time.perf_counter() - began)
    return min(found) / len(batch["input_ids"])


def print_measured() -> None:
    """Read a `ShrinkRequest` and a `Source` as JSON from standard input, and print an `InferenceCost` as JSON."""
    asked = json.loads(sys.stdin.read())
    request, source = ShrinkRequest.from_json(asked["request"]), Source.model_validate(asked["source"])
    tokenizer = None if source.tokenizer is None else Path(source.tokenizer)
    cost = measured(Path(source.folder), evidence_of(request), tokenizer, Path(request.folder))
    print(cost.model_dump_json())


def _compute_of(task: InferenceTask | None) -> Any:
    def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (model(**batch).logits,)

    return forward if task is None else task.compute


def _method(name: str) -> Shrinker:
    check_method(name)
    return SHRINKERS[name]


def _known(num_bytes: int) -> Estimate:
    return Estimate(likely_bytes=num_bytes, low_bytes=num_bytes, high_bytes=num_bytes, measured_bytes=num_bytes)


def _on_meta(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device. Unlike ``model.to``, this keeps shared tensors shared."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        sizes = with_parts(tensor.detach(), lambda part: part.to("meta"))
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(sizes, requires_grad=tensor.requires_grad) if is_weight else sizes
    return copy.deepcopy(model, memo)


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
