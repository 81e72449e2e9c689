"""torch.distributed's stand-in for scripts that are healed in place."""
