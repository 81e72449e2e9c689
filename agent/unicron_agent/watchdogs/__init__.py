"""Watchdogs: alerts on each node about resources that run out, grow without end, or output that is missing."""
