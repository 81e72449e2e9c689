"""Write what is in the images that were built here, and under which licences: `python deploy/sbom.py FOLDER`.

For each image IMAGE.cdx.json, in the format CycloneDX, and IMAGE-licences.md. Python packages are told by their own
metadata, as they lie in the image, and Debian's libraries by what Debian says of them, which lies there too.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
import venv
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

IMAGES = ("control", "planner", "node")
TOOLS = Path(sys.executable).parent
DEBIAN = "var/lib/dpkg/status.d/"


def unpack(image: str, packages: Path) -> list[dict[str, str]]:
    """Unpack the metadata of an image's Python packages, and return what Debian says of each of its own.

    Raises:
        subprocess.CalledProcessError: there is no such image, or no container engine.
    """
    container = subprocess.check_output(["docker", "create", image], text=True).strip()  # noqa: S607
    described = []
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export:  # noqa: S607
            assert export.stdout  # noqa: S101 it is a pipe
            with tarfile.open(fileobj=export.stdout, mode="r|") as files:
                for file in files:
                    content = files.extractfile(file) if file.isfile() else None
                    if content and file.name.startswith(DEBIAN):
                        described.append(dict(HeaderParser().parsestr(content.read().decode()).items()))
                    elif content and ".dist-info/" in file.name:
                        to = packages / file.name.partition("/site-packages/")[2]
                        to.parent.mkdir(parents=True, exist_ok=True)
                        to.write_bytes(content.read())
    finally:
        subprocess.run(["docker", "rm", container], stdout=subprocess.DEVNULL, check=True)  # noqa: S607
    return sorted(described, key=lambda each: each["Package"])


def component(package: dict[str, str]) -> dict[str, Any]:
    """Return a Debian package as CycloneDX has it."""
    name, version, architecture = package["Package"], package["Version"], package["Architecture"]
    purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def write(image: str, folder: Path) -> None:
    """Write both files of one image."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, symlinks=True)
        (packages,) = Path(scratch).glob("lib/python*/site-packages")
        libraries = unpack(f"unicron-{image}", packages)
        python = f"{scratch}/bin/python"
        bill = json.loads(
            subprocess.check_output([TOOLS / "cyclonedx-py", "environment", "--output-reproducible", python])
        )
        options = ["--format=markdown", "--from=mixed", "--with-system"]
        licences = subprocess.check_output([TOOLS / "pip-licenses", f"--python={python}", *options], text=True)
    bill["components"] += [component(each) for each in libraries]
    (folder / f"{image}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    lines = [f"- {each['Package']} {each['Version']}: /usr/share/doc/{each['Package']}/copyright" for each in libraries]
    told = "\n".join(["", "Of Debian, with the licence in the image:", "", *lines, ""])
    (folder / f"{image}-licences.md").write_text(licences + told)
    sys.stdout.write(f"{folder}/{image}: {len(bill['components'])} components\n")


def main() -> None:
    """Do it for all images."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for image in IMAGES:
        write(image, folder)


if __name__ == "__main__":
    main()
