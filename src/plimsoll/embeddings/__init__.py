"""Pretrained word vectors: only the rows that are needed, in little memory."""
