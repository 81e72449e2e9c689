"""`python -m unicron_cli`: the command `unicron`."""

from unicron_cli.entry import main

main()
