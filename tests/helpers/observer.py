"""Queries of a cluster's messages and status, a real one or one in virtual time."""

from unicron.contracts.events import IterationFinished


class ClusterObserver:
    """Has a `client`, a `journal` and `iterations`, of all tasks; it asks for its `status`, and waits `until`."""

    async def listen(self):
        async for message in self.client.telemetry(IterationFinished):
            self.iterations.append(message)

    def of(self, kind, **fields):
        """Return the messages of a kind in the journal that say so."""
        return [
            message
            for message in self.journal
            if isinstance(message, kind) and all(getattr(message, name) == value for name, value in fields.items())
        ]

    def done(self, task):
        """Return the iterations that a task has reported; one may be missing: telemetry can be lost."""
        return [message.iteration for message in self.iterations if message.task == task]

    async def reached(self, task, iteration):
        """Wait until a task has finished an iteration, or a later one."""
        await self.until(lambda: max(self.done(task), default=-1) >= iteration)

    async def view(self, name):
        """Return what the registry knows of a task, None where it knows none."""
        return next((view for view in (await self.status()).tasks if view.spec.name == name), None)

    async def until_state(self, name, *states):
        """Wait until a task is in one of these states; return how the registry sees it."""

        async def there():
            view = await self.view(name)
            return view if view is not None and view.state in states else None

        return await self.until(there)
