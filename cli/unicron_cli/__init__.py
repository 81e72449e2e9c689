"""The command `unicron`: the one place where rooms meet."""
