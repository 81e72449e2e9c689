"""Other systems that heal, run beside Unicron by `benchmarks.parallel --vs` with the same model and the same faults."""
