"""Machines of a real Slurm: each id is one job, however often it is asked for, and what is refused has done nothing."""

import pytest
from helpers.slurm import missing, slurm
from helpers.waiting import until
from unicron_provisioner.providers.protocol import MachineRequest, ProviderError, RefusedError, Surroundings
from unicron_provisioner.providers.slurm import Options, make

from unicron.contracts.pools import Pool

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

DOWN = "PartitionName=closed Nodes=n1 State=INACTIVE\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=2, more=DOWN) as running:
        yield running


@pytest.fixture
def provider(cluster, tmp_path, monkeypatch):
    """Return what makes a provider, as one that starts again does."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)

    def build(partition="all", sbatch=("--exclusive",)):
        pool = Pool(name="gpu", provider="slurm", max=3)
        options = Options(partition=partition, sbatch=list(sbatch), env={"UNICRON_CONNECT_TIMEOUT_S": "60"})
        return make(pool, options, Surroundings(tmp_path, tmp_path, "nats://127.0.0.1:9"))

    yield build
    cluster.try_("scancel", "--user=root")
    cluster.until(lambda: not cluster.squeue(), "the end of all jobs")


def request(number, reason="it is wanted"):
    return MachineRequest(machine=f"gpu-{number}", pool="gpu", slots=2, reason=reason)


async def states(provider):
    return {report.machine: report.state for report in await provider.list()}


async def test_an_id_is_one_job_until_it_is_released(cluster, provider, tmp_path):
    first = provider()
    for _ in range(2):
        await first.ask(request(1))
    await provider().ask(request(1))  # it was started again, and has not heard the answer
    await first.ask(request(2))
    await first.ask(request(3))
    assert sorted(cluster.squeue()) == sorted(set(cluster.squeue()))
    assert len(cluster.squeue()) == 3
    written = {cluster.job(job)["StdOut"] for job in cluster.squeue()}
    assert written == {str(tmp_path / "machines" / f"gpu-{number}.log") for number in (1, 2, 3)}
    await until(lambda: _are(first, {"gpu-1": "running", "gpu-2": "running", "gpu-3": "coming"}))
    assert "gpu-1|it is wanted" in cluster.run("squeue", "--noheader", "-o", "%j|%k")
    nodes = {report.machine: report.node for report in await first.list()}
    assert len(set(nodes.values())) == 3
    await first.replace("gpu-1", request(4))
    for _ in range(2):
        await first.release("gpu-2")
    await until(lambda: _are(first, {"gpu-3": "running", "gpu-4": "running"}))
    cluster.run("scancel", "--name=gpu-3")
    await until(lambda: _are(first, {"gpu-3": "ended", "gpu-4": "running"}))
    await first.release("gpu-3")
    await first.release("gpu-4")
    assert await states(provider()) == {}
    assert cluster.squeue() == []


async def _are(provider, wanted):
    return await states(provider) == wanted


async def test_a_job_whose_number_was_not_heard_is_found_by_its_name(cluster, provider, tmp_path):
    await provider().ask(request(1))
    record = tmp_path / "machines" / "gpu-1.json"
    record.write_text('{"machine": "gpu-1", "node": "gpu-1", "job": ""}')
    await provider().ask(request(1))
    [job] = cluster.squeue()
    assert f'"job":"{job}"' in record.read_text()
    await provider().release("gpu-1")
    assert not record.exists()


@pytest.mark.parametrize(
    ("partition", "sbatch", "cure"),
    [
        ("nowhere", (), "name one that `sinfo` lists"),
        ("closed", (), "the partition is down"),
        ("all", ("--nosuch",), "`sbatch --help` lists"),
    ],
)
async def test_what_is_refused_leaves_nothing(cluster, provider, partition, sbatch, cure):
    refusing = provider(partition, sbatch)
    with pytest.raises(RefusedError, match=cure):
        await refusing.ask(request(1))
    assert await states(refusing) == {}
    assert cluster.squeue() == []


@pytest.mark.exhaustive("Slurm's commands wait seconds for a controller; what they say then has unit tests")
async def test_nothing_is_certain_while_the_controller_is_away(cluster, provider):
    asked = provider()
    await asked.ask(request(1))
    cluster.stop("slurmctld")
    try:
        for call in (asked.list(), asked.ask(request(2)), asked.release("gpu-1")):
            with pytest.raises(ProviderError, match="scontrol ping") as failed:
                await call
            assert not isinstance(failed.value, RefusedError)
    finally:
        cluster.start("slurmctld")
        cluster.until(lambda: cluster.try_("sinfo").returncode == 0, "slurmctld")
    await asked.ask(request(2))
    assert set(await states(asked)) == {"gpu-1", "gpu-2"}


async def test_without_slurm_it_says_so(provider, monkeypatch):
    made = provider()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ProviderError, match="no squeue on the PATH"):
        await made.list()
