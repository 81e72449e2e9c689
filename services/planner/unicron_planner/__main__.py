"""`python -m unicron_planner` runs the planner."""

from unicron.own_modules import run

run("unicron_planner.main")
