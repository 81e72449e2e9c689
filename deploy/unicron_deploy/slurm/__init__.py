"""Unicron as a job of Slurm: the servers on its first node, an agent on each, and all that was in a folder they share."""
