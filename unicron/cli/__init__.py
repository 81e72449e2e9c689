"""The command `unicron`."""
