"""The hardware of a node: GPUs, kernel log, clock, network, and what their faults mean."""
