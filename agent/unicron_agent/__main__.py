"""`python -m unicron_agent`."""

from unicron.own_modules import run

run("unicron_agent.main")
