"""The library inside a training process."""
