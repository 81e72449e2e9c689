"""Training scripts that know nothing of Unicron, which `benchmarks.inplace` and `benchmarks.inplace_made` run."""
