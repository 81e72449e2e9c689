"""Carries faults out on a running cluster, at once or when a task reaches an iteration."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from unicron.client import Client
from unicron.contracts.answers import Status
from unicron.contracts.base import Record
from unicron.contracts.events import IterationFinished
from unicron.contracts.faults import LOGGED, NODE, WORKER, kind_of
from unicron.contracts.tasks import Member, NodeState
from unicron.errors import BusUnavailableError, InvalidInputError, UnicronError
from unicron.settings import PREFIX
from unicron_chaos.script import RankTarget, ScriptedFault

POLL_S = 0.2
"""Pause between two questions to the registry; it knows what is lost of the telemetry."""

TARGET_S = 60.0
"""How long a fault waits for its target: a task that heals from the one before may be short of ranks."""

NO_RESTART = (
    "restart-node needs a running cluster of `unicron up`; name its folder with --dir, and elsewhere start the node's "
    "agent again, in containers by `docker start`"
)

Restart = Callable[[str], Awaitable[None]]
"""Brings a killed node back; only who started its agent can."""


class Injection(Record, kw_only=True, frozen=True):
    """A fault that was carried out.

    Attributes:
        target: as it was given, TASK:RANK or a node.
        value: what else the fault took; empty for nothing.
        node, worker: whom it hit; no worker for a whole node.
        at: Unix seconds just before it was ordered.
        text: what was done, for a person.
    """

    fault: str
    target: str
    value: str = ""
    node: str
    worker: str = ""
    at: float
    text: str


async def inject(
    client: Client, fault: str, target: RankTarget | str, restart: Restart | None = None, value: str = ""
) -> Injection:
    """Carry `fault` out now.

    Raises:
        InvalidInputError: there is no such fault or target, it does not take this value, its agent refuses, or nobody
            here can bring a node back.
        BusUnavailableError: nobody answers.
    """
    kind = kind_of(fault)
    value = kind.checked(value)
    status = None
    if isinstance(target, str) and WORKER in kind.targets:
        target = named(status := await client.status(), target)
    if (WORKER if isinstance(target, RankTarget) else NODE) not in kind.targets:
        raise InvalidInputError(f"{fault} takes {' or '.join(kind.targets)}, not {target}")
    member = find_member(status or await client.status(), target) if isinstance(target, RankTarget) else None
    node, worker = (member.node, member.worker) if member else (str(target), "")
    at = time.time()
    if fault == "restart-node":
        if restart is None:
            raise InvalidInputError(NO_RESTART)
        await restart(node)
        text = f"{node} was started again"
    else:
        text = await _inject(client, node, fault, worker, value)
    return Injection(fault=fault, target=str(target), value=value, node=node, worker=worker, at=at, text=text)


async def _inject(client: Client, node: str, fault: str, worker: str, value: str) -> str:
    """Have a node's agent carry out a fault; where nobody answers, say whether there is such a node at all."""
    try:
        return await client.inject(node, fault, worker, value)
    except BusUnavailableError as error:
        views = {view.node: view.state for view in (await client.status()).nodes}
        if node not in views:
            known = ", ".join(views) or "none"
            raise InvalidInputError(f"no node {node!r}; the known ones are {known}") from error
        raise BusUnavailableError(f"the agent of {node}, which is {views[node]}, does not answer") from error


def named(status: Status, target: str) -> RankTarget | str:
    """Return the rank of the worker whose process has a name, if no node has it; else the name."""
    if any(view.node == target for view in status.nodes):
        return target
    ranks = (
        RankTarget(task=view.spec.name, rank=rank)
        for view in status.tasks
        for rank, member in enumerate(view.members)
        if member.worker == target
    )
    return next(ranks, target)


def find_member(status: Status, target: RankTarget) -> Member:
    """Return the worker that has the rank `target` now.

    Raises:
        InvalidInputError: there is no such task, or it has no such rank just now.
    """
    view = next((view for view in status.tasks if view.spec.name == target.task), None)
    if view is None:
        known = ", ".join(view.spec.name for view in status.tasks) or "none"
        raise InvalidInputError(f"no task {target.task!r}; the known ones are {known}")
    if target.rank >= len(view.members):
        ranks = f"it has ranks 0 to {len(view.members) - 1}" if view.members else "it has no workers now"
        raise InvalidInputError(f"no rank {target.rank} in task {target.task}, which is {view.state}; {ranks}")
    return view.members[target.rank]


async def run_script(
    client: Client, faults: Sequence[ScriptedFault], restart: Restart | None, on_injection: Callable[[Injection], None]
) -> None:
    """Let each fault strike while its task computes its iteration; return after the last one.

    Faults whose time has come strike in the order of the script, one after the other.

    Raises:
        InvalidInputError: a task ended before a fault's iteration, or task or target did not appear in `TARGET_S`; or,
            before any fault strikes, one is known to be refused.
    """
    await _check(client, faults, restart)
    computing: dict[str, int] = {}
    news = asyncio.Event()
    jobs = [
        asyncio.ensure_future(_listen(client, computing, news)),
        asyncio.ensure_future(_poll(client, computing, news, waiting := list(faults))),
    ]
    try:
        while waiting:
            due = next((fault for fault in waiting if computing.get(fault.task, -1) >= fault.iteration), None)
            if due is not None:
                on_injection(await _insist(client, due, restart))
                waiting.remove(due)
                continue
            news.clear()
            either = asyncio.ensure_future(news.wait())
            await asyncio.wait([either, *jobs], return_when=asyncio.FIRST_COMPLETED)
            either.cancel()
            for job in jobs:
                if job.done():
                    job.result()
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


async def _check(client: Client, faults: Sequence[ScriptedFault], restart: Restart | None) -> None:
    """Raise if a fault would be refused, by its node or by each that could have its rank; who is silent is trusted."""
    running = await _settings(client)
    for number, fault in enumerate(faults, start=1):
        if fault.fault == "restart-node":
            refusals = [] if restart else [NO_RESTART]
        else:
            able = [fault.target] if isinstance(fault.target, str) else list(running)
            refusals = [_refusal(fault.fault, node, running.get(node, {})) for node in able]
        if refusals and all(refusals):
            raise InvalidInputError(f"fault {number}, {fault.fault} {fault.target}: {refusals[0]}")


async def _settings(client: Client) -> dict[str, Mapping[str, str]]:
    """Return what the agents of nodes that are up run with, empty for who does not say."""

    async def of(node: str) -> Mapping[str, str]:
        with contextlib.suppress(UnicronError):
            return (await client.settings(node)).settings
        return {}

    with contextlib.suppress(BusUnavailableError):
        nodes = [view.node for view in (await client.status()).nodes if view.state is NodeState.UP]
        return dict(zip(nodes, await asyncio.gather(*map(of, nodes)), strict=True))
    return {}


def _refusal(fault: str, node: str, settings: Mapping[str, str]) -> str:
    """Return why the agent of a node that runs with `settings` refuses a fault, with the cure; empty if it does not."""
    if settings.get(f"{PREFIX}CHAOS") == str(False):
        return f"{node} injects no faults; start its agent with {PREFIX}CHAOS=true"
    if fault in LOGGED and settings.get(f"{PREFIX}KERNEL_LOG") == "":
        return f"{node} follows no kernel's log; start its agent with {PREFIX}KERNEL_LOG=FILE, or leave the fault out"
    return ""


async def _listen(client: Client, computing: dict[str, int], news: asyncio.Event) -> None:
    async for done in client.telemetry(IterationFinished):
        if isinstance(done, IterationFinished):
            computing[done.task] = done.iteration + 1
            news.set()


async def _poll(client: Client, computing: dict[str, int], news: asyncio.Event, waiting: list[ScriptedFault]) -> None:
    """Ask the registry too, since telemetry may be lost; raise where a fault can't strike any more."""
    clock = asyncio.get_running_loop()
    deadline = clock.time() + TARGET_S
    while True:
        with contextlib.suppress(BusUnavailableError):  # faults may strike services too
            views = (await client.status()).tasks
            unknown = {fault.task for fault in waiting} - {view.spec.name for view in views}
            if unknown and clock.time() > deadline:
                raise InvalidInputError(f"no task {min(unknown)!r} was submitted in {TARGET_S:.0f} s; submit it first")
            for view in views:
                name = view.spec.name
                if view.members or view.iteration >= 0:
                    computing[name] = max(computing.get(name, -1), view.iteration + 1)
                late = next((fault for fault in waiting if fault.task == name), None)
                if view.state.ended and late is not None and computing.get(name, -1) < late.iteration:
                    raise InvalidInputError(
                        f"task {name} is {view.state} and did not reach iteration {late.iteration} for {late.fault} "
                        f"{late.target}; let the fault strike earlier"
                    )
            news.set()
        await asyncio.sleep(POLL_S)


async def _ended(client: Client, target: RankTarget | str) -> bool:
    """Return whether the target is a rank of a task that is over."""
    with contextlib.suppress(BusUnavailableError):
        views = (await client.status()).tasks
        return any(
            isinstance(target, RankTarget) and view.spec.name == target.task and view.state.ended for view in views
        )
    return False


async def _insist(client: Client, fault: ScriptedFault, restart: Restart | None) -> Injection:
    """Inject the fault as soon as its target is there."""
    clock = asyncio.get_running_loop()
    deadline = clock.time() + TARGET_S
    while True:
        try:
            return await inject(client, fault.fault, fault.target, restart, fault.value)
        except (InvalidInputError, BusUnavailableError):
            if clock.time() > deadline or await _ended(client, fault.target):
                raise
        await asyncio.sleep(POLL_S)
