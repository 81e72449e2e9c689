"""The worker processes of a node: started, watched, looked into and ended."""
