"""A Docker engine, where this machine has one."""

from functools import cache

IMAGE = "python:3.11-slim-bookworm"
"""The image on which deploy/Dockerfile builds."""


@cache
def missing():
    """Return why there can be no containers here; empty where there can."""
    try:
        import docker  # noqa: PLC0415 not everybody installs it
    except ImportError:
        return "the package docker is not installed: pip install '.[docker]'"
    try:
        docker.from_env(timeout=5).images.get(IMAGE)
    except docker.errors.ImageNotFound:
        return f"the engine has no image {IMAGE}: docker pull {IMAGE}"
    except docker.errors.DockerException as error:
        return f"no container engine: {error}"
    return ""
