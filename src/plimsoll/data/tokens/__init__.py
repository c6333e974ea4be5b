"""Tokenizers, and a corpus stored as tokens."""
