"""`python -m unicron_cli`: the command `unicron`."""

from unicron_cli.main import main

main()
