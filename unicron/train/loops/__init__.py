"""The place of a script in its training loops."""
