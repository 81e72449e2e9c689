"""The worker's core: iterations, memberships, microbatches; and its line to the agent. Knows no process group."""
