"""How the ranks of a task have its model saved in the end, before any of them is through."""

from unicron.errors import GroupBrokenError
from unicron.train.shell import Shell


async def save_model(shell: Shell, *, first: bool, in_parts: bool) -> None:
    """Have the first replica write the model, and wait for that with all others.

    Args:
        shell: of this rank.
        first: it belongs to that replica.
        in_parts: its replica has other ranks; they go on together, or not.

    Raises:
        GroupBrokenError: some rank is gone: the model may be saved or not.
        OSError: it can't be written.
    """
    failure = None
    try:
        if first:
            await shell.save_model()
        await shell.meet()
    except GroupBrokenError as error:
        failure = error
    told = await shell.confer(float(failure is not None)) if in_parts else []
    if failure is None and any(failed for (failed,) in told):
        failure = GroupBrokenError("another rank of this replica does not know whether the model is saved")
    if failure is not None:
        raise failure
