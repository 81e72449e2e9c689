"""`python -m unicron_console` runs the console."""

from unicron.own_modules import run

run("unicron_console.main")
