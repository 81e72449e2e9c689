"""The shared language: every message and record that crosses a process boundary.

Start with `events`, then `commands`, `plans`, `tasks` and `queries`.
"""
