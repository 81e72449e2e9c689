"""Nodes that fail together, by racks and NVLink domains."""

import pytest

from unicron.snapshots.placement import place
from unicron.snapshots.zones import failure_zones


def alike(zones):
    """Return the nodes of each zone."""
    return sorted(sorted(node for node in zones if zones[node] == zone) for zone in set(zones.values()))


@pytest.mark.parametrize(
    ("racks", "domains", "zones"),
    [
        pytest.param({}, {}, [], id="nothing is known"),
        pytest.param({"a": "1", "b": "1", "c": "2", "d": ""}, {}, [["a", "b"], ["c"]], id="racks only"),
        pytest.param({}, {"a": "1", "b": "2", "c": "1"}, [["a", "c"], ["b"]], id="domains only"),
        pytest.param(
            {"a": "1", "b": "2", "c": "3"}, {"a": "x", "b": "x", "c": "y"}, [["a", "b"], ["c"]], id="a domain of racks"
        ),
        pytest.param(
            {"a": "1", "b": "1", "c": "2"}, {"a": "x", "b": "y", "c": "z"}, [["a", "b"], ["c"]], id="a rack of domains"
        ),
        pytest.param({"a": "1", "b": "1"}, {"a": "x", "b": "y"}, [["a"], ["b"]], id="one rack, so domains"),
        pytest.param({"a": "1", "b": "2"}, {"a": "x", "b": "x"}, [["a"], ["b"]], id="one domain, so racks"),
        pytest.param({"a": "1"}, {"b": "1"}, [["a"], ["b"]], id="a rack and a domain of one name"),
    ],
)
def test_nodes_of_a_rack_or_a_domain_are_of_one_zone(racks, domains, zones):
    assert alike(failure_zones(racks, domains)) == zones


def test_copies_of_a_state_are_in_two_domains_where_there_are_two():
    domains = {f"n{number}": "a" if number < 4 else "b" for number in range(8)}
    groups = place(sorted(domains), 2, failure_zones({}, domains)).groups
    assert all(len({domains[node] for node in group}) == 2 for group in groups)
