"""The saved states of a task: who saves where, what is found when no worker has a state, and what goes to storage."""
