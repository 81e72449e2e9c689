"""The console: what a cluster does, and what its failures cost, on a page and as JSON."""
