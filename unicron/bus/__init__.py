"""The message bus: a protocol, the real one on NATS, and one in memory. Both pass the same contract test."""
