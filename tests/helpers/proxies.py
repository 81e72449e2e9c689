"""The variables of a host whose only way out is a proxy, here one that is gone: no traffic of a cluster goes there."""

import os

GONE = "http://127.0.0.1:9"

VARIABLES = {
    **{f"{name}_proxy": GONE for name in ("http", "https", "grpc", "all")},
    **{f"{name}_PROXY": GONE for name in ("HTTP", "HTTPS", "ALL")},
    "GRPC_ADDRESS_HTTP_PROXY": "127.0.0.1:9",
    "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES": "0.0.0.0/0",
    "no_grpc_proxy": "elsewhere.invalid",  # gRPC heeds it rather than the next, which is for what tests ask themselves
    "no_proxy": "127.0.0.1,localhost",
}

USUAL = {name: value for name, value in os.environ.items() if name not in VARIABLES or value != VARIABLES[name]}
"""The environment without them: the client of a container engine goes out as the host does."""
