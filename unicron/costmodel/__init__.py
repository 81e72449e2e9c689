"""A closed-form model of how fast and in how much memory Megatron trains a transformer on x GPUs.

`catalogue` and `formulas` need no numpy, so that every part of Unicron can check a task file with them; `costs` and
`planning` do.
"""
