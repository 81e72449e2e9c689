"""`Session`, and what the worker's core needs of torch: ranks, states and gradients."""
