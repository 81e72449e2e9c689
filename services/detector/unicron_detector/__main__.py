"""`python -m unicron_detector` runs the detector."""

from unicron.own_modules import run

run("unicron_detector.main")
