"""`python -m unicron_planner` runs the planner."""

import sys

from unicron_planner.main import main

sys.exit(main())
