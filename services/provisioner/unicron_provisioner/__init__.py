"""The provisioner: machines come and go as tasks need them, and one that is lost is replaced."""
