"""Thin adapters of trainers people already use onto `plimsoll.run`; one file each."""
