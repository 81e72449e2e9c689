"""The detector: facts of agents become failures with a severity (paper section 4).

Read `core` first, then what it is made of: `nodes`, `processes`, `memberships`, `hardware` and `report`; `ladder`
counts attempts, `window` and `statistics` watch iteration times, `main` wires it all up.
"""
