"""Checkpoints: where copies of states are kept, how likely they survive, and how often to save. Pure functions."""
