"""Checkpoint folders: what they hold, read from headers alone, and each tensor of them read or mapped by itself.

    checkpoint = open_checkpoint(folder)
    weight = checkpoint.entries["transformer.wte.weight"].read()

`plimsoll.models.loading.load_model` makes a model of one.
"""

from plimsoll.weights.loading.coded import Coded as Coded
from plimsoll.weights.loading.entries import Entry as Entry
from plimsoll.weights.loading.opening import Checkpoint as Checkpoint
from plimsoll.weights.loading.opening import open_checkpoint as open_checkpoint
