"""What benchmarks share: command line and output, clusters, processes, paired runs, strikes, statistics."""
