"""Process groups: between replicas and inside of one, and how a rank gets out of a collective that is broken."""
