"""Checkpoints on a directory or an object store: what lies where, which are complete, and which pass their check."""
