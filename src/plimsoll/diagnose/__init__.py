"""What used the memory and what would free it: from the records of a run to a diagnosis."""
