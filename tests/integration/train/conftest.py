"""Training scripts and references that several modules share."""

import pytest
from helpers.training import ITERATIONS, plain_run, write_script


@pytest.fixture(scope="module", autouse=True)
def patient():
    """An agent that gets no core for a while, or is started again, is no lost node: that has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNICRON_GRACE_S", "3")
        patch.setenv("UNICRON_HEARTBEAT_TIMEOUT_S", "10")
        yield


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    """The usual script."""
    return write_script(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="session")
def plain(script):
    """What it comes to undisturbed, in one process without any cluster."""
    return plain_run(script, script.parent / "plain.pt", ITERATIONS=str(ITERATIONS), ACCUMULATE="float64")
