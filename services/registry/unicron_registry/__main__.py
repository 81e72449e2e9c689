"""`python -m unicron_registry`."""

from unicron.own_modules import run

run("unicron_registry.main")
