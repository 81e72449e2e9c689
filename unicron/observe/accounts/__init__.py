"""Goodput: what the GPU time of tasks went into, worked out from the journal alone. Pure; for commands and services."""
