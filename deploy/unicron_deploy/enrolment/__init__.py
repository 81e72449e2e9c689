"""The enroller: lets in nodes that no one has named, by join tokens. It holds the keys of the cluster."""
