"""The provisioner's decisions, pure: which machines are asked for and which are given back, and why.

Facts say which nodes there are and what tasks can use; the shell says what became of its errands at the providers.
What is to be asked of a provider stands in the state until the shell says what became of it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from unicron.contracts.answers import Reply
from unicron.contracts.base import MachinesListed, Message, ProviderAnswered, SetTimer, Started, TimerFired
from unicron.contracts.events import (
    FailureDetected,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    NodeLeaving,
    PlanDecided,
    TaskPaused,
    TaskRemoved,
    TaskStateChanged,
    TaskSubmitted,
)
from unicron.contracts.pools import Pool, Stage
from unicron.contracts.queries import GetPools
from unicron.service.core import Answers, Core, Handlers
from unicron_provisioner import errands, nodes, tasks
from unicron_provisioner.demand import wanted
from unicron_provisioner.settle import settle
from unicron_provisioner.state import PoolRun, State
from unicron_provisioner.view import view

LOOK = "look"
"""The timer at which everything is looked at again."""

MOVING_S, STEADY_S = 1.0, 10.0
"""Seconds from one such look to the next: while something is to come or to go, and otherwise."""


class ProvisionerCore(Core):
    """Decides which machines there are to be.

    Args:
        state: what an earlier instance remembered, None at the very first start.
        pools: their rules, in order; without any it does nothing.
    """

    def __init__(self, state: State | None = None, pools: Iterable[Pool] = ()) -> None:
        self.state: State = state or State()
        self._pools = {pool.name: pool for pool in pools}
        self.handlers: Handlers = {Started: self._started}
        if self._pools:
            self.handlers = {
                **self.handlers,
                TimerFired: self._look,
                ProviderAnswered: lambda fact: self._reported(fact, errands.answered),
                MachinesListed: lambda fact: self._reported(fact, errands.listed),
                NodeAdmitted: self._after(nodes.admitted),
                FailureDetected: self._after(nodes.lost),
                NodeGone: self._after(nodes.gone),
                NodeLeaving: self._after(nodes.leaving),
                NodeDrained: self._after(nodes.drained),
                TaskSubmitted: self._after(lambda state, fact, _: tasks.submitted(state, fact)),
                TaskPaused: self._after(lambda state, fact, _: tasks.paused(state, fact)),
                TaskRemoved: self._after(lambda state, fact, _: tasks.removed(state, fact)),
                TaskStateChanged: self._after(tasks.changed),
                PlanDecided: self._after(tasks.planned),
            }
        self.answers: Answers = {GetPools: lambda _: (Reply(pools=view(self.state, self._pools)), [])}
        for name, pool in self._pools.items():
            self.state.pools.setdefault(name, PoolRun()).observe = pool.observe

    def _started(self, started: Started) -> list[Message]:
        """Wait until all is read that was said meanwhile; nobody knows what became of errands that were under way."""
        state = self.state
        state.clock = state.started = started.at
        state.behind = state.current = False
        for name in [name for name in state.pools if name not in self._pools]:
            del state.pools[name]  # what belongs to it stays as it is
        for run in state.pools.values():
            errands.forget_answers(run, state)
        return [SetTimer(name=LOOK, after_s=MOVING_S)] if self._pools else []

    def _look(self, timer: TimerFired) -> list[Message]:
        state = self.state
        state.clock = timer.at
        state.current = state.current or not state.behind
        state.behind = False
        return [*self._settle(timer), self._next_look()]

    def _after(self, take_in: Callable[[State, Any, float], list[Message] | None]) -> Callable[[Any], list[Message]]:
        """Return what takes a fact in and then decides what follows from it."""

        def handle(fact: Message) -> list[Message]:
            state = self.state
            state.behind = state.behind or fact.at <= state.started
            return [*(take_in(state, fact, fact.at) or []), *self._settle(fact, fact.at)]

        return handle

    def _reported(self, fact: Any, take_in: Callable[[State, Pool, Any, float], list[Message]]) -> list[Message]:
        pool = self._pools.get(fact.pool)
        if pool is None:
            return []
        self.state.clock = fact.at
        return [*take_in(self.state, pool, fact, fact.at), *self._settle(fact), self._next_look()]

    def _settle(self, cause: Message, now: float | None = None) -> list[Message]:
        """Decide about all pools, and give the shell what is to be done."""
        state, out = self.state, list[Message]()
        if not state.current:
            return out
        now, counts = state.clock if now is None else now, wanted(state, self._pools)
        for name, pool in self._pools.items():
            out += settle(state, pool, counts[name], cause.id, now)
            errands.next_errand(state, pool, now)
        return out

    def _next_look(self) -> Message:
        state = self.state
        steady = state.current and all(each.stage is Stage.UP for each in state.machines.values())
        steady = steady and not any(run.errand or run.owed or run.troubles for run in state.pools.values())
        return SetTimer(name=LOOK, after_s=STEADY_S if steady else MOVING_S)

    def validate(self) -> list[str]:
        """Return what contradicts itself in the state."""
        found = []
        nodes_up = [each.node for each in self.state.machines.values() if each.stage is Stage.UP]
        if len(set(nodes_up)) < len(nodes_up):
            found.append(f"two machines are one node: {', '.join(sorted(nodes_up))}")
        released = set(self.state.released)
        found += [
            f"{id_} is {each.stage} after it was given back"
            for id_, each in self.state.machines.items()
            if id_ in released and each.stage is not Stage.RELEASING
        ]
        return found
