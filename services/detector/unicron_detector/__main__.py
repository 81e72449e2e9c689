"""`python -m unicron_detector` runs the detector."""

import sys

from unicron_detector.main import main

sys.exit(main())
