"""`python -m unicron_straggler`."""

import sys

from unicron_straggler.main import main

sys.exit(main())
