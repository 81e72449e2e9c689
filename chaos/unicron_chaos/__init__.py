"""Faults on purpose: scripts of them, random storms of them, and what carries them out on a running cluster."""
