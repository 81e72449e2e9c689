"""A cluster in words: what each message says, the story of a failure, why a plan was decided."""
