"""The key of a cluster's nodes."""

from unicron_agent.fabric import Fabric

from unicron import proofs

KEY = proofs.new_key()


def fabric(folder, node="n1", key=KEY, **fields):
    """Return a node's end of it, with a file of its own in `folder`."""
    path = folder / f"{node}-fabric.key"
    path.touch(mode=0o600)
    path.write_bytes(proofs.as_file(key))
    return Fabric(str(path), node, **fields)
