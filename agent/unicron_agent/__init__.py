"""The agent: one a node."""
