"""Shuffled batches that workers read ahead, with a cursor that moves only on request."""
