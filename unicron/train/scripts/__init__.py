"""Scripts without a session: restarted by a launcher, or healed in place with no line changed."""
