"""The command `unicron pools`: pools of machines, what each is to have and has, and why."""

from rich.console import Group
from rich.text import Text

from unicron.contracts.pools import PoolsView, PoolView, Stage
from unicron_cli.output import Json, Nats, print_view, with_client
from unicron_cli.views import plain_table


def pools(nats: Nats = None, as_json: Json = False) -> None:
    """Show the pools of machines: what each is to have and has, and why."""
    view = with_client(nats, lambda client: client.pools())
    print_view(view, lambda: pools_view(view), as_json)


def pools_view(view: PoolsView) -> Group:
    """Return pools as a table, and below it the machines that are neither in use nor idle."""
    if not view.pools:
        return Group(Text("the provisioner has no file of pools: no node comes or goes by itself (UNICRON_POOLS)"))
    table = plain_table("POOL", "PROVIDER", "NODES", "COMING", "GOING", "SPARE", "REASON")
    for each in view.pools:
        table.add_row(
            each.pool.name,
            each.pool.provider,
            f"{each.have} of {each.wanted} wanted, {each.pool.max} at most",
            str(each.asked),
            str(each.going),
            str(each.spare),
            _reason(each),
        )
    moving = [
        Text(f"{machine.node or machine.machine} is {machine.stage}: {machine.reason}")
        for each in view.pools
        for machine in each.machines
        if machine.stage is not Stage.UP
    ]
    return Group(table, *moving)


def _reason(view: PoolView) -> Text:
    if view.trouble:
        return Text(view.trouble, "red")
    return Text(("only looks on: " if view.pool.observe else "") + view.reason)
