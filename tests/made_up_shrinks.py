"""A stand-in for the process that compresses models: each method leaves a share of the bytes, and has a cost."""

from __future__ import annotations

import json
from pathlib import Path

from plimsoll.compression.worker import Made, Offer
from plimsoll.errors import InputError, KilledError
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import InferenceCost, Quality

BYTES = 1000
EFFECTS = {"layers": (0.5, 0.4), "heads": (0.8, 0.1), "int8": (0.3, 0.01), "int4": (0.2, 0.5)}


class MadeUp:
    """Answers in place of the process, and records the requested models."""

    made: list[str] = []
    teachers: list[Path | None] = []
    trainings: list[tuple[int, Path | None]] = []
    dies_at: str | None = None
    refuses: tuple[str, ...] = ()
    no: str | None = None
    original_loss = 0.0
    header_bytes = 0

    def __init__(self, request):
        fields = json.loads(request.read_text())
        assert fields["record"] == "shrink-request"
        self.is_job = fields["job"] is not None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def offers(self):
        known = [Offer(method=name, saves="much", choices=(Choice(technique=name),)) for name in EFFECTS]
        return (*known, Offer(method="units", saves="more", reason="no recurrent layers"))

    def check(self, chain):
        if MadeUp.no is not None:
            raise InputError(MadeUp.no)

    def weight_bytes(self, chain):
        if {"int8", "int4"} <= {choice.technique for choice in chain}:
            return None
        size = BYTES
        for choice in chain:
            size = int(size * EFFECTS[choice.technique][0])
        return size

    def make(self, source, chain, target):
        name = " > ".join(map(str, chain)) or "original"
        if name == MadeUp.dies_at:
            raise KilledError("the process was killed: give the same command again", 9)
        if name in MadeUp.refuses:
            raise InputError(f"{name} cannot be judged: leave it out")
        MadeUp.made.append(name)
        (target / "config.json").write_text(json.dumps({"name": name}))
        size = self.weight_bytes(chain)
        loss = MadeUp.original_loss + sum(EFFECTS[choice.technique][1] for choice in chain)
        if self.is_job:
            gain = Path(source.folder) / "gain.json"
            if gain.is_file():  # a model that was trained, here from 0.4
                loss, name = loss + 0.4 - json.loads(gain.read_text()), " > ".join(["run", *map(str, chain)])
            (target / "config.json").write_text(json.dumps({"name": name}))
            quality = Quality(loss=loss, num_samples=10)
        else:
            quality = Quality(loss=loss, num_samples=10, similarity=1 - loss)
        file_bytes = size + MadeUp.header_bytes
        return Made(form="plain", file_bytes=file_bytes, weight_bytes=size, quality=quality, has_own_tokenizer=False)

    def measured(self, source):
        return InferenceCost(rows=1, longest_tokens=1, peak_bytes=2 * BYTES, baseline_bytes=BYTES, row_seconds=0.5)

    def predicted_training(self, source, teacher=None):
        MadeUp.teachers.append(teacher)
        return None
