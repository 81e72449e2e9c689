"""The detector: facts of agents become failures with a severity (paper section 4).

Read `core` first, then what it is made of: `nodes`, `processes`, `memberships` and `report`. `rules` and `rules.toml`
classify exceptions, `ladder` counts attempts, `window` and `statistics` watch iteration times, `main` wires it all up.
"""
