"""Numeric tests use one thread: for such small models, waiting for a second one would take most of the time."""

import torch

torch.set_num_threads(1)
