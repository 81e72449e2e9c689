"""`python -m unicron_transition`."""

from unicron.own_modules import run

run("unicron_transition.main")
