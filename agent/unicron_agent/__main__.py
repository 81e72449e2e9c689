"""`python -m unicron_agent`."""

import sys

from unicron_agent.main import main

sys.exit(main())
