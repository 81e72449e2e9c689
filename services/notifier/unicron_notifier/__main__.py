"""`python -m unicron_notifier`."""

from unicron.own_modules import run

run("unicron_notifier.main")
