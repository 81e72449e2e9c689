"""The detector service."""
