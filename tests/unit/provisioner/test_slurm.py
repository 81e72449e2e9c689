"""What squeue says of the jobs that are machines of a pool, and what is made of that."""

import os

import pytest
from unicron_provisioner.providers.protocol import Surroundings
from unicron_provisioner.providers.slurm import Options, make

from unicron.contracts.pools import Pool


@pytest.fixture
def provider(tmp_path, monkeypatch):
    """Have a provider of one machine, and a squeue that writes what is in a file if it is asked for all partitions."""
    program = tmp_path / "squeue"
    program.write_text(f'#!/bin/sh\n[ "$1" = --all ] && cat {tmp_path}/queue\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "machines").mkdir()
    (tmp_path / "machines" / "gpu-1.json").write_text('{"machine": "gpu-1", "node": "gpu-1", "job": "7"}')
    pool = Pool(name="gpu", provider="slurm", max=1)
    return make(pool, Options(partition="staff"), Surroundings(tmp_path, tmp_path, "nats://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("line", "state", "told"),
    [
        ("7|RUNNING|N/A|n1|gpu-1|x", "running", ""),
        ("7|PENDING|N/A|(Resources)|gpu-1|x", "coming", "job 7 is PENDING: (Resources)"),
        ("7|PENDING|N/A|(uid 9 not in group permitted to use this partition)|gpu-1|x", "ended", "name a partition in"),
        ("7|TIMEOUT|N/A|n1|gpu-1|x", "ended", "job 7 is TIMEOUT"),
        ("", "ended", "Slurm knows nothing of job 7 any more"),
    ],
)
async def test_a_machine_is_what_its_job_is(provider, tmp_path, line, state, told):
    (tmp_path / "queue").write_text(f"{line}\n")
    [report] = await provider.list()
    assert report.state == state
    assert told in report.reason
