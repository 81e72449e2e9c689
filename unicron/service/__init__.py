"""The shell of a service: it runs a pure core on the bus, and commits state and messages in one value."""
