"""What tests share: one file a room, plain functions and builders."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
