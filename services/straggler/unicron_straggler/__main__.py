"""`python -m unicron_straggler`."""

from unicron.own_modules import run

run("unicron_straggler.main")
