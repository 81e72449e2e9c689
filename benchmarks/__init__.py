"""Figures that Unicron is judged by; each prints JSON and says on what machine it ran."""
