"""The command `unicron`, whatever modules the folder has in which it is given."""

from unicron.own_modules import run


def main() -> None:
    """Run it, and exit with its status."""
    run("unicron_cli.main")
