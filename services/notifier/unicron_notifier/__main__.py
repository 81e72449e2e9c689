"""`python -m unicron_notifier`."""

import sys

from unicron_notifier.main import main

sys.exit(main())
