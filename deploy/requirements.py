"""Print the requirements of the distribution and of the extras named as arguments, one a line.

An image installs them before it sees the source, so that a change of the source costs no new download.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
found = set(project["dependencies"])
for extra in sys.argv[1:]:
    found.update(project["optional-dependencies"][extra])
sys.stdout.write("\n".join(sorted(found)) + "\n")
