"""`python -m unicron_provisioner`."""

from unicron.own_modules import run

run("unicron_provisioner.main")
