"""A technique that another package ships: what it takes to state one, and no more. It does nothing.

Numerics: none are changed, but it says so of none, so that a job has to allow it by its name.
"""

from contextlib import nullcontext

from plimsoll.records.plan import Choice
from plimsoll.techniques import Technique


class Rests(Technique):
    """`Technique`: nothing."""

    name = "rests"
    numerics = "lossy"
    summary = "nothing is done"
    by_hand = "do nothing"

    def choices(self, workload, setting):
        return (Choice(technique=self.name),)

    def install(self, workload, choice):
        return nullcontext()
