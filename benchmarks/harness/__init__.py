"""Shared code of benchmarks: command line and output, clusters, processes, paired runs, strikes, statistics."""
