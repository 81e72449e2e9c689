"""Values that services once wrote are read by those of today, whatever form the state has taken since.

`commits_1.json` holds, for each service, the largest commit of a storm, written when commits had no version yet.
"""

import json
from pathlib import Path

import pytest
from unicron_simulator.world import wirings

from unicron import codec
from unicron.commit import Commit

OLD = json.loads(Path(__file__).with_name("commits_1.json").read_text())


@pytest.mark.parametrize("name", OLD)
def test_a_service_goes_on_from_a_commit_of_the_first_version(name):
    wiring = wirings()[name]
    commit = codec.decode(bytes.fromhex(OLD[name]), Commit)
    state = commit.restored(name, wiring.state, wiring.migrations)
    assert wiring.core(state).state == state
    assert {"node-1", "node-3"} <= set(state.nodes)
    assert list(state.tasks) == ["task-a", "task-b"]
