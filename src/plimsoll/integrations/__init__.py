"""Thin adapters that run `plimsoll.step` inside the trainers of other libraries, one module each."""
