"""The transition service."""
