"""Storms: the product's own cores in virtual time under a seed's faults, with invariants checked at every step."""
