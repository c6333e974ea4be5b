"""Recurrent language models, classifiers and taggers on `torch.nn`."""
