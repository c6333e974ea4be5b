"""Tokens cut into samples: windows, spans, packed rows, streams, and their labels."""
