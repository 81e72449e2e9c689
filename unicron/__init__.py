"""Unicron: a self-healing workload manager for large-model training."""

__version__ = "0.1.0"
