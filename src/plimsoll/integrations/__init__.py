"""Thin adapters of trainers people already use onto `plimsoll.step`; one file each."""
