"""What runs out, grows without end, or does not come: watched on each node, told before it is too late."""
