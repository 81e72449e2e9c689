"""Policies compared on failure traces: what failures cost under each (paper, section 7.4)."""
