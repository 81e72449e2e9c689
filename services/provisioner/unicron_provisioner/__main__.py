"""`python -m unicron_provisioner`."""

import sys

from unicron_provisioner.main import main

sys.exit(main())
