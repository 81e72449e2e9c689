"""A worker's state as bytes: saved, compared, sent, gathered from other layouts, and written to storage."""
