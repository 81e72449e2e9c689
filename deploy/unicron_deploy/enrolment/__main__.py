"""`python -m unicron_deploy.enrolment`."""

import sys

from unicron_deploy.enrolment.main import main

sys.exit(main())
