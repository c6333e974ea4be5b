"""Mechanisms that techniques install, such as side streams, sliced computations, sharding and replaced optimizers."""
