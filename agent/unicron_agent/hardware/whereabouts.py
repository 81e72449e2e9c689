"""Asks around where this node is: the settings first, then the topology file, Slurm, and the driver of the GPUs."""

import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
from pathlib import Path

import pynvml

from unicron.files import read_text
from unicron_agent.hardware.topology import (
    Location,
    fabric_domain,
    find_node,
    parse_topology,
    read_slurm_topology,
    read_slurm_variables,
)
from unicron_agent.settings import AgentSettings

log = logging.getLogger(__name__)

ANSWERS_S = 2.0
"""As long as Slurm's controller is waited for; a node starts without its answer."""


def locate(settings: AgentSettings) -> Location:
    """Return in which rack and NVLink domain this node is, as far as anybody says so.

    Raises:
        InvalidInputError: the topology file can't be used.
    """
    found = Location(settings.rack, settings.domain)
    if settings.topology:
        found = found.completed(_from_file(Path(settings.topology), settings.node))
    return found.completed(_from_slurm()).completed(_from_driver())


def _from_file(path: Path, node: str) -> Location:
    rows = parse_topology(read_text(path, "give the path of a topology file, or none"), path)
    found = find_node(rows, node, path)
    if found == Location():
        log.warning("%s names no rack and no domain of %s: add it there, or nobody knows where it is", path, node)
    return found


def _from_slurm() -> Location:
    """Return what Slurm says where it has started us: in our environment, or else when it is asked."""
    found, node = read_slurm_variables(os.environ), os.environ.get("SLURMD_NODENAME", "")
    scontrol = shutil.which("scontrol")
    if found != Location() or not node or scontrol is None:
        return found
    command = [scontrol, "show", "topology"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWERS_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("Slurm does not say where %s is: %s", node, error)  # without a topology plugin it can't
        return Location()
    return read_slurm_topology(said.stdout, node)


def _from_driver() -> Location:
    """Return the fabric that all GPUs of this node are in; none where the driver knows of none, or of several."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Location()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        domains = {_fabric(handle) for handle in handles}
    except pynvml.NVMLError:  # an older driver, or GPUs without such a fabric
        return Location()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return Location(domain=domains.pop()) if len(domains) == 1 else Location()


def _fabric(handle: object) -> str:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    registered = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == pynvml.NVML_SUCCESS
    return fabric_domain(bytes(info.clusterUuid), info.cliqueId) if registered else ""
