"""From any text or log to the out-of-memory errors it tells of: their kind, their numbers and what is likely behind."""
