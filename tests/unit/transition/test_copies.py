"""Keepers of copies: other nodes than those that fail with the saver's."""

import pytest
from unicron_transition.cluster import KnownNodes, NodeRun


def cluster(**where):
    """Return a cluster of nodes, each given as "rack/domain"."""
    both = {node: text.partition("/") for node, text in where.items()}
    return KnownNodes(nodes={node: NodeRun(rack=rack, domain=domain) for node, (rack, _, domain) in both.items()})


@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"a": "/1", "b": "/1", "c": "/2", "d": "/2"}, id="domains"),
        pytest.param({"a": "1/", "b": "1/", "c": "2/", "d": "2/"}, id="racks"),
        pytest.param({"a": "1/x", "b": "2/x", "c": "3/y", "d": "4/y"}, id="domains of several racks"),
        pytest.param({"a": "1/x", "b": "1/y", "c": "2/z", "d": "2/u"}, id="racks of several domains"),
        pytest.param({"a": "1/x", "b": "1/x", "c": "1/y", "d": "1/y"}, id="one rack of several domains"),
    ],
)
def test_a_copy_is_kept_where_it_does_not_fail_with_the_other(where):
    there = cluster(**where)
    assert {next(each.node for each in there.partners(node)) for node in "ab"} == {"c", "d"}
    there.nodes["a"].drained = True
    there.invalidate_partners()
    assert [each.node for each in there.partners("a")][-1] == "b", "one that is to go prefers the others likewise"
