"""Slurm as its commands show it: lists of nodes, jobs and states of nodes, read and checked."""
