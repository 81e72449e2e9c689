"""Shared code of tests: one file a topic, plain functions and builders."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
