"""The snapshots of a node: what lies in its memory, and how it comes from and goes to other nodes and storage."""
