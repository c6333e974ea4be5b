"""Checkpoint folders: only headers are read to list the tensors, and each tensor can be read or mapped separately.

    checkpoint = open_checkpoint(folder)
    weight = checkpoint.entries["transformer.wte.weight"].read()

`plimsoll.models.loading.load_model` builds a model from a checkpoint.
"""

from plimsoll.weights.loading.coded import Coded as Coded
from plimsoll.weights.loading.entries import Entry as Entry
from plimsoll.weights.loading.opening import Checkpoint as Checkpoint
from plimsoll.weights.loading.opening import open_checkpoint as open_checkpoint
