"""The planner service: which task gets how many workers, and which (paper section 5)."""
