"""Failure domains of nodes: racks and NVLink domains. Pure."""

from collections.abc import Mapping


def failure_zones(racks: Mapping[str, str], domains: Mapping[str, str]) -> dict[str, str]:
    """Return the zone of each node of which a rack or a domain is known; nodes of one zone fail together.

    Nodes are of one zone where they share a rack or a domain, directly or by others in between. Where that makes one
    zone of all, the domains are the zones, or the racks if there is only one domain: two nodes that fail together
    less often are better than none.

    Args:
        racks: by node; "" where that is not known.
        domains: of NVLink by node; "" where that is not known.
    """
    racks = {node: f"rack {rack}" for node, rack in racks.items() if rack}
    domains = {node: f"domain {domain}" for node, domain in domains.items() if domain}
    joined = _connected(racks, domains)
    return next((zones for zones in (joined, domains, racks) if len(set(zones.values())) > 1), joined)


def _connected(racks: Mapping[str, str], domains: Mapping[str, str]) -> dict[str, str]:
    """Return for each node the first name of all racks and domains that are connected with its own."""
    parents = {name: name for name in (*racks.values(), *domains.values())}

    def root(name: str) -> str:
        while parents[name] != name:
            parents[name] = name = parents[parents[name]]
        return name

    for node in racks.keys() & domains.keys():
        first, second = sorted((root(racks[node]), root(domains[node])))
        parents[second] = first
    return {node: root(name) for node, name in {**domains, **racks}.items()}
