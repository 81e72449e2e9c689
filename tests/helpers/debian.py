"""Debian's packages, unpacked into a folder and not installed: those of this machine's release, or of another one."""

import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
QUICK = ("-oAcquire::http::Timeout=10", "-oAcquire::Retries=0")


def unpack(packages: Iterable[str], folder: Path) -> str:
    """Unpack packages of this machine's release; return why that failed, empty where it has not."""
    with tempfile.TemporaryDirectory() as scratch:
        failed = _run(["apt-get", *QUICK, "download", *packages], scratch)
        return failed or _extract(Path(scratch), folder)


def unpack_of(release: str, packages: Iterable[str], folder: Path) -> str:
    """Unpack packages of a release with all that they depend on; return as `unpack` does."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for each in ("lists/partial", "cache/archives/partial"):
            (root / each).mkdir(parents=True)
        (root / "status").touch()  # nothing is installed: all that is needed comes along
        (root / "sources.list").write_text(f"deb [signed-by={KEYS}] {MIRROR} {release} main\n")
        (root / "apt.conf").write_text(
            f'Dir::State "{root}"; Dir::State::status "{root}/status"; Dir::Cache "{root}/cache";\n'
            f'Dir::Etc::sourcelist "{root}/sources.list"; Dir::Etc::sourceparts "-"; APT::Sandbox::User "root";\n'
        )
        apt = ["env", f"APT_CONFIG={root}/apt.conf", "apt-get", *QUICK, "-y"]
        for words in ["update"], ["install", "--no-install-recommends", "--download-only", *packages]:
            if failed := _run([*apt, *words], scratch):
                return failed
        return _extract(root / "cache" / "archives", folder)


def _run(words: list[str], folder: str) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return f"{' '.join(words[:4])}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}" if done.returncode else ""


def _extract(packages: Path, folder: Path) -> str:
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    return ""
