"""`python -m unicron_transition`."""

import sys

from unicron_transition.main import main

sys.exit(main())
