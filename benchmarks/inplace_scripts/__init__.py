"""Training scripts that know nothing of Unicron, for `benchmarks.inplace`: one shape of script each."""
