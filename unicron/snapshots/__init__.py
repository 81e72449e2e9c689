"""Saved states: where copies belong and survive, how often to save, when pieces travel, and what lies on storage."""
