"""Unicron as a job of Slurm: servers on its first node, an agent on each, and what stays in a folder they share."""
