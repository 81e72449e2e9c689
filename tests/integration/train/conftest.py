"""What several modules train and compare with."""

import pytest
from helpers.training import ITERATIONS, plain_run, write_script


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    """The usual script."""
    return write_script(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="session")
def plain(script):
    """What it comes to undisturbed, in one process without any cluster."""
    return plain_run(script, script.parent / "plain.pt", ITERATIONS=str(ITERATIONS), ACCUMULATE="float64")
