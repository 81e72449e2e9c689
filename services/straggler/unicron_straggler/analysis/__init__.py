"""The costs of stragglers, and their causes: a job is simulated without them and compared with its trace.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis". A pure library: `reader` makes a
`Trace`, `measures.analyze` an `Analysis` of it.
"""
