"""Checkpoints on storage: what lies where, which of them are complete, and which of those pass their check."""
