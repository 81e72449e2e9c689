"""A machine with AMD's GPUs: what amd-smi says of them, and a program of that name that says it."""

import json
import os

PROGRAM = '#!/bin/sh\ncd "$(dirname "$0")" && echo "$*" >> asked && env > environment && . ./mood && cat "$1.json"\n'


def told(number, uncorrected=0, **metric):
    """Return what `amd-smi list` and `amd-smi metric` say of a GPU."""
    serial = f"{0xD4B1DBB1E6A69540 + number:016x}"
    uuid = f"{serial[:2]}ff74a1-0000-1000-80{serial[2:4]}-{serial[4:]}"
    listed = {"gpu": number, "bdf": f"0000:{number + 0x1A:02x}:00.0", "uuid": uuid}
    measured = {
        "gpu": number,
        "power": {"socket_power": {"value": 158, "unit": "W"}, "gfx_voltage": "N/A", "throttle_status": "N/A"},
        "temperature": {"edge": "N/A", "hotspot": {"value": 45, "unit": "C"}, "mem": {"value": 38, "unit": "C"}},
        "pcie": {"width": 16, "replay_count": 3},
        "ecc": {"total_correctable_count": 7, "total_uncorrectable_count": uncorrected},
        "mem_usage": {"total_vram": {"value": 192, "unit": "GB"}, "used_vram": {"value": 286, "unit": "MB"}},
    }
    return listed, {**measured, **metric}


def texts(gpus):
    """Return what the program prints, as ROCm 7 has it."""
    return [json.dumps([listed for listed, _ in gpus]), json.dumps({"gpu_data": [measured for _, measured in gpus]})]


class AmdMachine:
    """Has an amd-smi in the path, and no rocm-smi."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        folder.mkdir()
        program = folder / "amd-smi"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        self.behave(":")
        self.has(told(0), told(1))

    def has(self, *gpus):
        """Have these from the next question on."""
        for name, text in zip(("list", "metric"), texts(gpus), strict=True):
            (self.folder / "next").write_text(text)
            (self.folder / "next").rename(self.folder / f"{name}.json")

    def behave(self, command):
        """Have the program do something before it answers."""
        (self.folder / "mood").write_text(f"{command}\n")

    def asked(self):
        """Return what it was asked for so far, and the environment that it had."""
        return (self.folder / "asked").read_text().splitlines(), (self.folder / "environment").read_text()
