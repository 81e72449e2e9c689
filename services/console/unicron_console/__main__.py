"""`python -m unicron_console` runs the console."""

import sys

from unicron_console.main import main

if __name__ == "__main__":
    sys.exit(main())
