"""Storms in which machines of a pool come and go, from a provider that has moods; and planted bugs, which they find."""

import pytest
from unicron_provisioner.core import ProvisionerCore
from unicron_simulator.storms import storm
from unicron_simulator.storms.faults import LoseMachine, Mood
from unicron_simulator.storms.scene import scene
from unicron_simulator.storms.world import StormParts

from unicron.contracts.base import Answer, ProviderAnswered
from unicron.contracts.pools import Stage

BATCH = 10
MORE = pytest.mark.exhaustive("the more seeds, the rarer what they find")


@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param(first, marks=[MORE] * bool(first)) for first in range(0, 1000, BATCH)])
def test_nothing_that_must_not_be_happens_to_pools_in_a_storm(first):
    for seed in range(first, first + (BATCH if first else 3)):
        outcome = storm.run(seed, pools=True)
        assert not outcome.violation, outcome.story


def test_a_storm_with_pools_strikes_what_it_strikes_without_and_machines():
    for seed in range(100):
        plain, pooled = scene(seed), scene(seed, pools=True)
        assert [each for each in pooled.faults if not isinstance(each, LoseMachine | Mood)] == plain.faults
        assert pooled.pools
        assert len(pooled.faults) > len(plain.faults)


class Doubling(ProvisionerCore):
    """Asks for another machine where it got no answer about one."""

    def handle(self, message):
        if isinstance(message, ProviderAnswered) and message.answer is Answer.UNKNOWN:
            run = self.state.pools[message.pool]
            if run.errand and run.errand.number == message.errand:
                self.state.machines.pop(run.errand.machine, None)
        return super().handle(message)


class Hasty(ProvisionerCore):
    """Gives machines back while they have work."""

    def handle(self, message):
        out = super().handle(message)
        for machine in self.state.machines.values():
            if machine.stage is Stage.DRAINED:
                machine.stage = Stage.RELEASING
        return out


class Spendthrift(ProvisionerCore):
    """Replaces without counting."""

    def handle(self, message):
        for run in self.state.pools.values():
            run.losses.clear()
        return super().handle(message)


@pytest.mark.exhaustive("the storms themselves are in each run")
@pytest.mark.parametrize(
    ("core", "words"),
    [(Doubling, "has|too|twice"), (Hasty, "given back with"), (Spendthrift, "replaced within an hour")],
)
def test_a_planted_bug_is_found_within_100_storms(core, words):
    found = (storm.run(seed, StormParts(provisioner=core), shrink=False, pools=True).violation for seed in range(100))
    violation = next(filter(None, found), "")
    assert any(word in violation for word in words.split("|")), violation
