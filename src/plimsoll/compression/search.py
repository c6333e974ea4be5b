"""The search for the best model under a target size: first each method alone, then the most promising chains.

    record = shrink(source, out, options)

Every number is measured on a real model, in another process (`plimsoll.compression.candidates`): the size of the files,
peak and time of inference, and quality on the evaluation data before and after recovery training. Estimates
(`plimsoll.compression.chains`) only select the chains to make. Results are kept in ``out/.shrink``, so the same command
resumes after Ctrl-C or a kill.

This process holds no tensors. Does NOT tune the settings of recovery training, and measures quality only on the
evaluation data.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.compression.chains import Chain, Guess, Single, guesses, smallest, varied
from plimsoll.compression.folder import drop_if_empty, opened, refuse_overlap, take
from plimsoll.compression.recover import Trained, cost_of, train_again
from plimsoll.compression.request import ShrinkOptions, ShrinkSource, decisive
from plimsoll.compression.worker import Made, Offer, ShrinkProcess, ShrinkRequest, Source
from plimsoll.errors import InputError, OutputError
from plimsoll.files.store import Progress, silent
from plimsoll.records.base import write_atomically
from plimsoll.records.job import Job
from plimsoll.records.job_yaml import near
from plimsoll.records.plan import Choice
from plimsoll.records.run import RunRecord
from plimsoll.records.shrink import METHODS, SHRINK_RECORD, Quality, ShrinkRecord, Small, TrainingCost, Unused
from plimsoll.records.units import format_bytes
from plimsoll.report.plan_sheets import budget_word
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.supervise import prepare_data

_VOCABULARY = "vocabulary"
_MOST_GUESSED = 8  # a target is refused if this number of chains, smallest estimate first, miss it by far
_SURELY = 1.5  # margin: an unseen chain may be smaller by this factor; it was 1.15 for a BERT with 150 chains
_MOST_SIZED = 400  # the maximum number of estimated chains whose exact size is computed
_ALONE, _CHAINS = "methods alone", "chains"


class RefusedError(Exception):
    """A process has refused its input, printed the reason to standard error and exited with ``exit_code``."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def shrink(
    source: ShrinkSource,
    out: Path,
    options: ShrinkOptions,
    *,
    force: bool = False,
    keep_all: bool = False,
    quiet: bool = False,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda text: None,
) -> ShrinkRecord:
    """Make the best model under a target, make the model of a given chain, or try every choice alone.

    If the same command was interrupted, it is resumed.

    Args:
        source: the original and its evaluation data.
        out: the folder for the model. ``shrink.json`` is written next to the model's files.
        options: the target or chain, and the settings of training and evaluation.
        force: start again, and overwrite ``out``.
        keep_all: keep every model in ``out/.shrink``.
        quiet: show no progress while the data are prepared.
        progress: called with the stage, the number of models tried, and the number of models to try.
        say: called with a line of text about each model.

    Returns:
        the record of all models, which is also saved as ``shrink.json``.

    Raises:
        InputError: if an input cannot be used, or no chain reaches the target; the message gives a remedy.
        OutputError: if ``out`` holds other files or results, or cannot be written.
    """
    began = time.monotonic()
    for name in options.forbids:
        if name not in METHODS:
            raise InputError(f"--forbid {name}: there is no such method; {near(name, METHODS)}")
    refuse_overlap(out, source.belongings)
    work = opened(out, decisive(source, options), force)
    with ExitStack() as unfinished:
        unfinished.callback(drop_if_empty, work)  # an empty folder would block the corrected command
        record, folder = _made_in(work, source, out, options, quiet, progress, say)
        unfinished.pop_all()
    record = record.model_copy(update={"seconds": time.monotonic() - began})
    if folder is not None:
        take(folder, out)
    record.save(out / SHRINK_RECORD)
    if not keep_all:
        shutil.rmtree(work, ignore_errors=True)
    return record


def _made_in(  # noqa: PLR0917 -- the arguments of `shrink`
    work: Path,
    source: ShrinkSource,
    out: Path,
    options: ShrinkOptions,
    quiet: bool,
    progress: Progress,
    say: Callable[[str], None],
) -> tuple[ShrinkRecord, Path | None]:
    """Start the process that makes models, refuse an impossible chain, prepare the data, and search.

    Return the record, and the folder of the selected model; ``None`` if no model is selected.
    """
    cache = source.cache or work / "data"
    request = ShrinkRequest(
        folder=str(source.folder.absolute()),
        cache=str(cache.absolute()),
        job=source.job,
        data=None if source.data is None else str(source.data.absolute()),
        columns=source.columns,
        has_header=source.has_header,
        most_samples=options.most_samples,
    )
    request.save(work / "request.json")
    with ShrinkProcess(work / "request.json") as process:
        if options.methods:
            process.check(options.methods)
        if source.job is not None:
            _prepare(source.job, work, cache, quiet)
        return _Shrinking(source, options, str(out), work, cache, process, progress, say).run()


@dataclass
class _Shrinking:
    """The state of one search: the models made and measured so far, and the chains whose model could not be made."""

    source: ShrinkSource
    options: ShrinkOptions
    out: str
    work: Path
    cache: Path
    process: ShrinkProcess
    progress: Progress
    say: Callable[[str], None]
    _offers: tuple[Offer, ...] = ()
    _models: list[Small] = field(default_factory=list)
    _failed: list[Unused] = field(default_factory=list)

    def run(self) -> tuple[ShrinkRecord, Path | None]:
        """Make the model of the given chain, or search for a chain.

        Return the record, and the folder of the selected model; ``None`` if no model is selected.
        """
        self.say(f"checking which of {len(METHODS)} methods apply to {self.source.folder}")
        offers = self.process.offers()
        self._offers = tuple(one for one in offers if one.method not in self.options.forbids)
        if self.options.target_bytes is not None:
            self._refuse_hopeless(self.options.target_bytes)
        self._add(self._original())
        if self.options.methods:
            self._add(self._made(self.options.methods, recovers=True))
            best: int | None = 1
        else:
            self._try_alone()
            best = self._search() if self.options.target_bytes is not None else None
        return self._record(best), None if best is None else self._place(self._models[best].chain) / "model"

    def _record(self, best: int | None, is_complete: bool = True) -> ShrinkRecord:
        """Return the record of the models made so far. ``best`` is the index of the selected model."""
        return ShrinkRecord(
            model=str(self.source.folder),
            task="embed" if self.source.job is None else self.source.job.task,
            evaluated_on=f"{self.source.described}, {self._models[0].quality.num_samples:,} samples",
            output=self.out,
            target_bytes=self.options.target_bytes,
            budget_bytes=self.options.budget_bytes,
            models=tuple(self._models),
            best=best,
            unused=(*self._not_offered(), *self._failed),
            saves={one.method: one.saves for one in self._offers if one.method in self._used()},
            is_complete=is_complete,
        )

    def _refuse_hopeless(self, target_bytes: int) -> None:
        """Refuse a target far below the reachable size, before any model is made.

        Sizes are computed without making models. Chains are examined in the order of their estimated size, and not all
        are examined. A smaller chain may be missed, so only targets far below the smallest size found are refused.
        """
        original_bytes = self.process.weight_bytes(())
        assert original_bytes is not None
        alone = [(offer, choice) for offer in self._offers for choice in offer.choices]
        sizes = [(offer, choice, self.process.weight_bytes((choice,))) for offer, choice in alone]
        orders = {offer.method: number for number, offer in enumerate(self._offers)}
        singles = [
            Single(choice, num_bytes / original_bytes, 0.0, orders[offer.method], self._is_last(choice))
            for offer, choice, num_bytes in sizes
            if num_bytes is not None
        ]
        found = [(original_bytes, "the original")]
        for guess in smallest(singles)[:_MOST_SIZED]:
            num_bytes = self.process.weight_bytes(guess.chain)
            if num_bytes is not None:
                found.append((num_bytes, " > ".join(map(str, guess.chain))))
                if num_bytes <= target_bytes * _SURELY:
                    return
            if len(found) > _MOST_GUESSED:
                break
        raise self._unreached(target_bytes, *min(found))

    def _unreached(self, target_bytes: int, smallest_bytes: int, name: str, more: str = "") -> InputError:
        without = f" without {', '.join(self.options.forbids)}" if self.options.forbids else ""
        return InputError(
            f"no chain of methods{without}{more} reaches {format_bytes(target_bytes)}: the smallest has about "
            f"{format_bytes(smallest_bytes)} ({name}); give --target {budget_word(smallest_bytes)} or more, or a "
            "chain of your own with --method"
        )

    def _not_offered(self) -> Iterator[Unused]:
        """Yield the methods that have no choices for this model. If the user gave a chain, yield nothing."""
        for one in self._offers if not self.options.methods else ():
            if one.reason:
                yield Unused(method=one.method, reason=one.reason)

    def _used(self) -> set[str]:
        return {choice.technique for model in self._models for choice in model.chain}

    def _original(self) -> Small:
        """Measure the original, before and after recovery training if that is requested.

        It is trained for as many steps as the smaller models, so that the gain from training alone is not credited to
        a method.
        """
        if self.options.recover_steps and self.source.job is not None:
            self.say(f"training the original for {self.options.recover_steps} steps, for comparison")
        try:
            small = self._made((), recovers=True)
        except InputError as error:  # it may be too large to train
            small = self._made((), recovers=False)
            self._failed.append(Unused(method="the original, trained as long", reason=str(error)))
            self.say(f"the original cannot be trained here: {error}")
        inference = small.inference and small.inference.model_copy(update={"speed": 1.0})  # measured against itself
        training = small.training
        if self.source.trained is not None:
            record = RunRecord.load(self.source.trained)
            cost = cost_of(record, has_teacher=bool(record.job.get("distill")))
            training = cost.model_copy(update={"predicted": training and training.predicted})
        return small.model_copy(update={"inference": inference, "training": training})

    def _try_alone(self) -> None:
        """Make and measure each choice alone."""
        chains = [(choice,) for offer in self._offers for choice in offer.choices]
        for number, chain in enumerate(chains):
            self.progress(_ALONE, number, len(chains))
            # Under a target, only the chains selected later are trained. Single choices only serve the estimates.
            self._try(chain, f"{number + 1} of {len(chains)}", recovers=self.options.target_bytes is None)
        self.progress(_ALONE, len(chains), len(chains))

    def _search(self) -> int:
        """Make the models of the most promising chains, and return the index of the best model under the target.

        Raises:
            InputError: if no model is under the target.
        """
        target_bytes = self.options.target_bytes
        assert target_bytes is not None
        taken = self._chains(target_bytes)
        for number, guess in enumerate(taken):
            self.progress(_CHAINS, number, len(taken))
            self._try(guess.chain, f"chain {number + 1} of {len(taken)}", recovers=True)
        self.progress(_CHAINS, len(taken), len(taken))
        self._models = [self._judged(model, target_bytes) for model in self._models]
        fitting = [number for number, model in enumerate(self._models) if not model.rejected]
        if fitting:
            return max(fitting, key=lambda number: self._models[number].best_quality.rank)
        more = ""
        if self._failed:
            last = self._failed[-1]
            more = f" ({len(self._failed)} failed, the last one {last.method}: {last.reason})"
        raise self._unreached(target_bytes, *self._smallest(), more)

    def _smallest(self) -> tuple[int, str]:
        """Return the size of the weight files and the name of a chain, for an error message.

        It is the chain with the smallest estimated size among those that no method refuses. If every examined chain is
        refused, it is the chain of the smallest model made so far.
        """
        for guess in smallest(self._singles())[:_MOST_SIZED]:
            num_bytes = self._sized(guess.chain)
            if num_bytes is not None:
                return num_bytes, " > ".join(map(str, guess.chain))
        least = min(self._models, key=lambda model: model.file_bytes)
        return least.file_bytes, least.name

    def _sized(self, chain: Chain) -> int | None:
        """Return the file bytes of a chain's model without making it; ``None`` if a method refuses its choice.

        The file bytes are the bytes of its weights, plus the bytes in the original's files that are not weights.
        """
        original, num_bytes = self._models[0], self.process.weight_bytes(chain)
        return None if num_bytes is None else num_bytes + original.file_bytes - original.weight_bytes

    def _judged(self, model: Small, target_bytes: int) -> Small:
        if model.file_bytes <= target_bytes:
            return model.model_copy(update={"rejected": ""})
        over = format_bytes(model.file_bytes - target_bytes)
        return model.model_copy(update={"rejected": f"{over} over the target"})

    def _chains(self, target_bytes: int) -> list[Guess]:
        """Select the chains to make: by increasing estimated loss, among chains whose computed file size fits."""
        singles, original = self._singles(), self._models[0]

        def fits(guess: Guess) -> bool:
            num_bytes = self._sized(guess.chain)
            return num_bytes is not None and num_bytes <= target_bytes

        guessed = guesses(singles, target_bytes / original.file_bytes)[:_MOST_SIZED]
        found = varied(filter(fits, guessed), self.options.most_tries)
        # If the estimates rule out every chain that fits, take the chain with the smallest estimate that fits.
        return found or varied(filter(fits, smallest(singles)[:_MOST_SIZED]), 1)

    def _singles(self) -> list[Single]:
        """Return the measured effect of each choice alone on the original."""
        original = self._models[0]
        orders = {offer.method: number for number, offer in enumerate(self._offers)}
        return [
            Single(
                model.chain[0],
                model.weight_bytes / original.weight_bytes,
                model.quality.loss - original.quality.loss,
                orders[model.chain[0].technique],
                self._is_last(model.chain[0]),
            )
            for model in self._models[1:]
            if len(model.chain) == 1
        ]

    def _try(self, chain: Chain, where: str, recovers: bool) -> None:
        """Make and measure the model of a chain. If this fails, report and record the reason, and continue.

        ``where`` is the model's number in the search, for messages.
        """
        try:
            self._add(self._made(chain, recovers), f"{where}, ")
        except InputError as error:
            name = " > ".join(map(str, chain))
            self._models = [one for one in self._models if one.chain != chain]  # the folder was overwritten
            self._failed.append(Unused(method=name, reason=str(error)))
            self.say(f"{where}, {name}: {error}")

    def _add(self, small: Small, where: str = "") -> None:
        """Add a model to the record, in place of an earlier model of the same chain, and report it."""
        self._models = [*(one for one in self._models if one.chain != small.chain), small]
        self.say(f"{where}{_sentence(small, self._models[0])}")
        self._record(None, is_complete=False).save(self.work / SHRINK_RECORD)

    def _can_recover(self, chain: Chain) -> bool:
        """Return whether the model of a chain can be trained.

        This needs a job. A model whose chain only changes the bits of weights, not their shapes, is not trained.
        """
        return self.source.job is not None and not (chain and all(map(self._is_last, chain)))

    def _is_last(self, choice: Choice) -> bool:
        return METHODS[choice.technique].stage == "values"

    def _made(self, chain: Chain, recovers: bool) -> Small:
        """Make the model of a chain, train it if ``recovers`` and possible, and measure it.

        If an interrupted run has stored the result, return that.
        """
        recovers = recovers and bool(self.options.recover_steps) and self._can_recover(chain)
        place = self._place(chain)
        kept, most_kept = place / f"small-{int(recovers)}.json", place / "small-1.json"
        for known in (most_kept, kept):  # the result of a trained model includes its quality before training
            if known.is_file():
                return Small.model_validate_json(known.read_text(encoding="utf-8"))
        (place / "small-0.json").unlink(missing_ok=True)  # its model folder is about to be overwritten
        source, folder = Source(folder=str(self.source.folder)), place / "model"
        made = self._fresh(source, chain, folder)
        recovered, training = None, None
        if recovers:
            again, training = self._recovered(chain, place)
            recovered = again.quality
            if recovered.rank > made.quality.rank:
                take(place / "recovered", folder)
                made = again.model_copy(update={"quality": made.quality})
        final = Source(folder=str(folder), tokenizer=_tokenizer(folder, made))
        is_asked = self.source.is_to_train or self.options.recover_steps
        if training is None and is_asked and self.source.job is not None and not any(map(self._is_last, chain)):
            training = TrainingCost(predicted=self.process.predicted_training(final))
        small = Small(
            chain=chain,
            form=made.form,
            file_bytes=made.file_bytes,
            weight_bytes=made.weight_bytes,
            quality=self._comparable(made.quality, chain),
            recovered=recovered and self._comparable(recovered, chain),
            recovery_steps=self.options.recover_steps if recovers else 0,
            inference=self.process.measured(final),
            training=training,
        )
        write_atomically(kept, small.model_dump_json().encode())
        return small

    def _comparable(self, quality: Quality, chain: Chain) -> Quality:
        """Return a language model's quality with a loss that is comparable with the original's.

        With a smaller vocabulary, the probability is divided among fewer tokens, which lowers the loss of every model.
        The amount by which the smaller vocabulary lowers the original's loss is therefore added to the loss.
        """
        fewer = tuple(choice for choice in chain if choice.technique == _VOCABULARY)
        if not fewer or not quality.is_language_model:
            return quality
        gain = self._loss_of(()) - self._loss_of(fewer)
        return quality.model_copy(update={"loss": quality.loss + gain})

    def _loss_of(self, chain: Chain) -> float:
        """Return the loss of a chain's model before recovery training, and make the model if necessary.

        The loss is computed over the model's own vocabulary.
        """
        place = self._place(chain)
        if not (place / "model.json").is_file():
            self._fresh(Source(folder=str(self.source.folder)), chain, place / "model")
        return Made.model_validate_json((place / "model.json").read_text(encoding="utf-8")).quality.loss

    def _fresh(self, source: Source, chain: Chain, folder: Path) -> Made:
        """Apply a chain to ``source``, and save the model in ``folder``, whose previous content is deleted first."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made = self.process.make(source, chain, folder)
        write_atomically(folder.parent / f"{folder.name}.json", made.model_dump_json().encode())
        return made

    def _recovered(self, chain: Chain, place: Path) -> tuple[Made, TrainingCost]:
        """Apply the choices that change shapes, train the model, then apply the choices that change only bits.

        The resulting model is in the folder ``recovered`` of ``place``.
        """
        structure = tuple(choice for choice in chain if not self._is_last(choice))
        values = chain[len(structure) :]
        untrained = self._fresh(Source(folder=str(self.source.folder)), structure, place / "untrained")
        begun = Source(folder=str(place / "untrained"), tokenizer=_tokenizer(place / "untrained", untrained))
        teacher = self._teacher(structure, place) if self.options.distills and chain else None
        trained = self._train(begun, place, self.options.recover_steps, teacher)
        predicted = self.process.predicted_training(begun, teacher)
        source = Source(folder=str(trained.folder), tokenizer=begun.tokenizer)
        made = self._fresh(source, values, place / "recovered")
        return made, trained.cost.model_copy(update={"predicted": predicted})

    def _teacher(self, structure: Chain, place: Path) -> Path:
        """Return the folder of the teacher: the original, with the smaller vocabulary if the chain reduces it.

        With the smaller vocabulary, its logits for the kept tokens equal the original's.
        """
        first = tuple(choice for choice in structure if choice.technique == _VOCABULARY)
        if not first:
            return self.source.folder
        self._fresh(Source(folder=str(self.source.folder)), first, place / "teacher")
        return place / "teacher"

    def _train(self, source: Source, place: Path, num_steps: int, teacher: Path | None) -> Trained:
        assert self.source.job is not None
        return train_again(self.source.job, source, place, self.cache, num_steps, self.options.budget_bytes, teacher)

    def _place(self, chain: Chain) -> Path:
        text = json.dumps([str(choice) for choice in chain])
        return self.work / "models" / hashlib.sha256(text.encode()).hexdigest()[:16]


def _tokenizer(folder: Path, made: Made) -> str | None:
    return str(folder) if made.has_own_tokenizer else None


def _sentence(small: Small, original: Small) -> str:
    quality, share = small.best_quality, small.file_bytes / original.file_bytes
    known = [
        *([f"accuracy {quality.accuracy:.1%}"] if quality.accuracy is not None else []),
        *([f"entity F1 {quality.entity_f1:.1%}"] if quality.entity_f1 is not None else []),
        *([f"similarity {quality.similarity:.4f}"] if quality.similarity is not None else []),
        *([f"perplexity {quality.perplexity:,.1f}"] if quality.perplexity is not None else []),
    ]
    return f"{small.name}: {format_bytes(small.file_bytes)} ({share:.0%}), {', '.join(known)}"


def _prepare(job: Job, work: Path, cache: Path, quiet: bool) -> None:
    """Prepare the data as ``plimsoll train`` does, in a separate process that prints its own errors.

    Raises:
        RefusedError: if the process refuses; it has printed the reason.
        OutputError: if the models in ``work`` were evaluated on other data.
    """
    key_file = work / "data-key"
    directory = RunDirectory.create(work / "prepared", force=True)
    directory.write_job(job)
    code = prepare_data(directory, cache, quiet)
    if code:
        raise RefusedError(code)
    key = json.loads(directory.prepared.read_text(encoding="utf-8"))["key"]
    if key_file.is_file() and key_file.read_text(encoding="utf-8") != key:
        raise OutputError(
            f"the texts of {job.data.train} have changed since {work} was started: give --force to start again"
        )
    write_atomically(key_file, key.encode())
