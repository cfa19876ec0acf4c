"""Pin what the virtual environment holds now: rewrite constraints.txt beside this file.

Run by `make lock`. To move to newer versions: remove the lines of the packages to move from constraints.txt, run
`make clean test`, then `make lock`, and read the diff.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

OWN = {"flowrl", "flowrl-operators"}
TOOLS = {"pip", "setuptools", "wheel"}  # come with the environment or with what needs them

HEADER = """\
# The exact versions that `make demo` and `make test` install. Written by requirements/lock.py (`make lock`).
# A constraint installs nothing by itself: what is needed, and in which range, stands in the two pyproject.toml files.
"""


def pins() -> list[str]:
    """One `name==version` line for each installed distribution, without local labels such as `+cpu`."""
    found = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name not in OWN | TOOLS:
            found[name] = distribution.version.split("+")[0]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


if __name__ == "__main__":
    target = Path(__file__).with_name("constraints.txt")
    lines = pins()
    target.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{target}: {len(lines)} pins, from {sys.prefix}")
