"""What is here: clusters of this machine."""

import contextlib
import os
from pathlib import Path

from unicron_deploy.embedded import LAYOUT


def clusters() -> dict[Path, int]:
    """Return the folders of this machine's embedded clusters that run, and a NATS server of each, as process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if Path(words[0]).name == "nats-server" and words[1:2] == ["-c"]:
                found[Path(words[2]).parent.parent] = int(path.parent.name)
    return {folder: found[folder] for folder in sorted(found) if os.access(folder / LAYOUT, os.R_OK)}
