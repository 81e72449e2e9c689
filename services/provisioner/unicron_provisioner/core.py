"""The provisioner's decisions."""
