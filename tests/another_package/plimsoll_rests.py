"""A technique of another package with the minimum that a technique must declare. It does nothing.

It changes no numerics, but declares `lossy`, so that a job has to allow it by name.
"""

from contextlib import nullcontext

from plimsoll.records.plan import Choice
from plimsoll.techniques import Technique


class Rests(Technique):
    """A `Technique` that does nothing."""

    name = "rests"
    numerics = "lossy"
    summary = "nothing is done"
    by_hand = "do nothing"

    def choices(self, workload, setting):
        return (Choice(technique=self.name),)

    def install(self, workload, choice):
        return nullcontext()
