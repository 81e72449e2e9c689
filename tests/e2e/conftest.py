"""Where containers are tested, their images are built first, once for all."""

import pytest
from helpers.compose import IMAGES, Cluster, command


@pytest.fixture(scope="session", autouse=True)
def images(tmp_path_factory) -> Cluster:
    """Build each image once, where Compose would look at it again for each service that has it."""
    cluster = Cluster(command(), tmp_path_factory.mktemp("images"))
    cluster.compose("build", *IMAGES.values())
    return cluster
