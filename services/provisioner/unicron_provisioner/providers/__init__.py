"""Providers of machines: one module for each kind."""
