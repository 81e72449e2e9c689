"""Who gives machines: one module for each kind of provider."""
