"""`python -m unicron_deploy.enrolment`."""

from unicron.own_modules import run

run("unicron_deploy.enrolment.main")
