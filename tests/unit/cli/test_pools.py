"""The output of `unicron pools`: how many nodes each pool is to have and has, and why; and the same for programs."""

import json

import msgspec
import pytest
from helpers.cli import printed
from unicron_cli import pools as command

from unicron.contracts.pools import MachineView, Pool, PoolsView, PoolView, Stage

GPU = Pool(name="gpu", provider="slurm", max=8)
MACHINES = [
    MachineView(machine="gpu-1a", stage=Stage.UP, node="gpu-1", reason="it has joined"),
    MachineView(machine="gpu-2b", stage=Stage.ASKED, reason="gpu-2 is lost: no power"),
    MachineView(machine="gpu-3c", stage=Stage.RETIRING, node="gpu-3", reason="no task has used it for 600 s"),
]
VIEW = PoolView(
    pool=GPU, wanted=3, have=2, asked=1, spare=1, going=1, reason="gpu-2 is lost: no power", machines=MACHINES
)


def shown(*pools):
    return [" ".join(line.split()) for line in printed(command.pools_view(PoolsView(pools=[*pools]))).splitlines()]


def test_each_pool_has_a_row_and_what_comes_or_goes_a_line():
    assert shown(VIEW) == [
        "POOL PROVIDER NODES COMING GOING SPARE REASON",
        "gpu slurm 2 of 3 wanted, 8 at most 1 1 1 gpu-2 is lost: no power",
        "gpu-2b is asked: gpu-2 is lost: no power",
        "gpu-3 is retiring: no task has used it for 600 s",
    ]


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        ({"trouble": "list had no answer within 30 s"}, "list had no answer within 30 s"),
        ({"pool": msgspec.structs.replace(GPU, observe=True)}, "only looks on: gpu-2 is lost: no power"),
    ],
)
def test_a_provider_that_cant_be_used_and_a_pool_that_only_looks_on_say_so(view, reason):
    assert shown(msgspec.structs.replace(VIEW, machines=[], **view))[1].endswith(f" 1 1 1 {reason}")


def test_without_pools_it_names_the_setting():
    assert "(UNICRON_POOLS)" in shown()[0]


def test_programs_get_all_that_is_known(monkeypatch, capsys):
    view = PoolsView(pools=[VIEW])
    monkeypatch.setattr(command, "with_client", lambda *_: view)
    command.pools(as_json=True)
    out = capsys.readouterr().out
    assert msgspec.convert(json.loads(out), PoolsView) == view
