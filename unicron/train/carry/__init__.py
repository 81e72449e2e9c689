"""The state of a running Python script, as another process can have it."""
