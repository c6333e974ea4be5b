"""Lowerings: the ops and scratch memory of a target device in place of traced ops."""
