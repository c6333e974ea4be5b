"""Mechanisms that techniques install: streams, sliced computations, sharding, replaced optimizers."""
