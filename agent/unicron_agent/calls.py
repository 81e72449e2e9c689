"""gRPC as the cluster's nodes use it among themselves: it takes nothing from the environment.

Variables are for the user's programs, which get them all: a proxy is the way out of the cluster, not from node to node.
"""

import os
from typing import Any

_HIDDEN = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("GRPC_")}
import grpc  # noqa: E402 reads most of its variables now, and never again
import grpc.aio  # noqa: E402

os.environ.update(_HIDDEN)

__all__ = ["DIRECT", "grpc"]

DIRECT: list[tuple[str, Any]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.address_http_proxy_enabled_addresses", ""),
    ("grpc.service_config_disable_resolution", 1),
]
"""Options of a channel that goes straight to its address: the variables for proxies are read for each channel."""
