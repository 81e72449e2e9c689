"""`python -m unicron_registry`."""

import sys

from unicron_registry.main import main

sys.exit(main())
