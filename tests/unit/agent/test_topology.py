"""In which rack and NVLink domain a node is: a topology file, what Slurm says, and the GPUs' fabric."""

from pathlib import Path

import pytest
from unicron_agent.hardware import whereabouts
from unicron_agent.hardware.topology import (
    Location,
    fabric_domain,
    find_node,
    names_node,
    parse_topology,
    read_slurm_topology,
    read_slurm_variables,
)
from unicron_agent.settings import AgentSettings

from unicron.errors import InvalidInputError

FILE = Path("topology.toml")

TEXT = """
[[nodes]]
names = "gpu-[01-18]"
rack = "r1"
domain = "nvl72-1"

[[nodes]]
names = "gpu-[19-36],login*"
rack = "r2"

[[nodes]]
names = "gpu-[19-27]"
domain = "nvl72-2"
"""


@pytest.mark.parametrize(
    ("names", "node", "is_named"),
    [
        ("gpu-7", "gpu-7", True),
        ("gpu-7", "gpu-70", False),
        ("gpu-[01-18,20],other", "gpu-20", True),
        ("gpu-[01-18,20],other", "gpu-19", False),
        ("gpu-[01-18,20],other", "other", True),
        ("gpu-[01-18]", "gpu-1", False),
        ("gpu-[1-118]", "gpu-01", False),
        ("gpu-[1-118]", "gpu-118", True),
        ("r[1-2]n[00-17]", "r2n17", True),
        ("r[1-2]n[00-17]", "r3n17", False),
        ("gpu-*", "gpu-a7", True),
        ("gpu.*", "gpux1", False),
        ("*", "anything", True),
    ],
)
def test_a_list_of_nodes_is_read_as_slurm_writes_it(names, node, is_named):
    assert names_node(names, node) is is_named


def test_a_node_is_where_all_rows_that_name_it_say():
    rows = parse_topology(TEXT, FILE)
    assert find_node(rows, "gpu-07", FILE) == Location("r1", "nvl72-1")
    assert find_node(rows, "gpu-20", FILE) == Location("r2", "nvl72-2")
    assert find_node(rows, "login1", FILE) == Location("r2", "")
    assert find_node(rows, "gpu-40", FILE) == Location()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes", "topology.toml: "),
        ("[[node]]\nnames='a'", "unknown field `node`"),
        ("nodes = 'a'", "Expected `array`"),
        ("[[nodes]]\nnames = 'a'\nracks = 'b'", "unknown field `racks`"),
        ("[[nodes]]\nrack = 'b'", "missing required field `names`"),
        ("[[nodes]]\nnames = 'a'\nrack = ''", "length >= 1"),
        ("[[nodes]]\nnames = 'a'\nrack = \"\\u0000\"", "matching regex"),
        ("[[nodes]]\nnames = 'a'", "row 1 of nodes (a): it has neither rack nor domain"),
        (
            "[[nodes]]\nnames = 'a-[1'\nrack = 'b'",
            "row 1 of nodes: list of nodes 'a-[1': the bracket at character 3 has no partner",
        ),
        ("[[nodes]]\nnames = 'a,,b'\nrack = 'b'", "list of nodes 'a,,b': expected names with commas between"),
        ("[[nodes]]\nnames = 'c,a-[3-1]'\nrack = 'b'", "list of nodes 'c,a-[3-1]': '3-1' is no number and no range"),
        ("[[nodes]]\nnames = 'a-[x]'\nrack = 'b'", "list of nodes 'a-[x]': 'x' is no number and no range"),
    ],
)
def test_a_file_that_can_not_be_used_is_refused_with_the_place_and_the_cure(text, words):
    with pytest.raises(InvalidInputError) as refused:
        parse_topology(text, FILE)
    assert words in str(refused.value)
    assert str(refused.value).startswith("topology.toml: ")


def test_a_node_that_two_rows_put_into_two_racks_is_refused():
    rows = parse_topology(TEXT + "[[nodes]]\nnames = '*'\nrack = 'r9'\n", FILE)
    words = "gpu-07 is in rack 'r1' by one row and in 'r9' by another"
    with pytest.raises(InvalidInputError, match=words):
        find_node(rows, "gpu-07", FILE)


@pytest.mark.parametrize(
    ("address", "pattern", "location"),
    [
        ("b8.tux1", "block.node", Location("", "b8")),
        ("s0.s4.tux1", "switch.switch.node", Location("s4", "")),
        ("b8.tux1.example.org", "block.node", Location("", "b8")),
        ("tux1", "node", Location()),
        ("tux1", "block.node", Location()),
        ("", "", Location()),
        ("b\n8.tux1", "block.node", Location()),
    ],
)
def test_what_slurm_says_to_a_step_is_read(address, pattern, location):
    variables = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert read_slurm_variables(variables) == location


BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=tux[00-17] BlockSize=18
BlockName=b2 BlockIndex=1 Nodes=tux[18-35] BlockSize=18
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=tux[00-35] BlockSize=36
"""

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=tux[0-3]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=tux[4-7]
SwitchName=s2 Level=1 LinkSpeed=1 Nodes=tux[0-7] Switches=s[0-1]
"""


@pytest.mark.parametrize(
    ("text", "node", "location"),
    [
        (BLOCKS, "tux20", Location("", "b2")),
        (BLOCKS, "tux40", Location()),
        (TREE, "tux5", Location("s1", "")),
        ("BlockName=b1 Nodes=tux[\nNodes=(null)\nslurm_load_topo error: x=1", "tux1", Location()),
    ],
)
def test_what_slurm_shows_of_its_topology_is_read(text, node, location):
    assert read_slurm_topology(text, node) == location


def test_a_fabric_of_several_nodes_is_a_domain_and_a_node_by_itself_is_none():
    assert fabric_domain(bytes(range(16)), 7) == "00010203-0405-0607-0809-0a0b0c0d0e0f.7"
    assert fabric_domain(bytes(16), 0) == ""


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """Slurm has started us, without a word on where we are, and can be asked."""
    for name in ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "tux20")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{BLOCKS}END\n")
    program.chmod(0o700)
    return program


def test_settings_come_before_the_file_and_the_file_before_slurm(slurm, tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text(TEXT)
    assert whereabouts.locate(AgentSettings(node="gpu-20")) == Location("", "b2")
    assert whereabouts.locate(AgentSettings(node="login1", topology=str(path))) == Location("r2", "b2")
    assert whereabouts.locate(AgentSettings(node="gpu-20", topology=str(path))) == Location("r2", "nvl72-2")
    found = whereabouts.locate(AgentSettings(node="gpu-20", topology=str(path), rack="mine"))
    assert found == Location("mine", "nvl72-2")


def test_a_slurm_that_does_not_answer_says_nothing(slurm):
    slurm.write_text("#!/bin/sh\nexit 1\n")
    assert whereabouts.locate(AgentSettings(node="n1")) == Location()


def test_a_topology_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="give the path of a topology file"):
        whereabouts.locate(AgentSettings(node="n1", topology=str(tmp_path / "none")))
