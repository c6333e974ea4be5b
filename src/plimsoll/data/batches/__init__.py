"""Shuffled batches read ahead by workers, with a cursor that moves only when told to."""
