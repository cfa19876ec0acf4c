"""Where the other stores are installed: an environment of their own, so that their requirements touch nothing here."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import ROOT

HERE = ROOT / ".venv-anchors"
REQUIREMENTS = ROOT / "requirements" / "anchors.txt"
INSTALL_TIMEOUT_S = 3600
ANCHORS = ("transfer_queue", "ray", "datasets", "tensordict", "torchrl", "cpprb", "lance")
"""Modules; the rest of the comparison needs none of them."""
DISTRIBUTIONS = (
    "TransferQueue", "ray", "datasets", "tensordict", "torchrl", "cpprb", "pylance", "pyarrow", "numba", "blosc2",
)  # fmt: skip
"""What a reader needs the versions of."""


def missing() -> list[str]:
    return [module for module in ANCHORS if find_spec(module) is None]


def prepare() -> Path:
    """Make the environment. torch goes in first and by exact version: otherwise pip may choose a build with CUDA."""
    python = HERE / "bin" / "python"
    if not python.exists():
        venv.create(HERE, with_pip=True)
    lines = REQUIREMENTS.read_text().splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    for packages in ([torch], ["-r", str(REQUIREMENTS)], ["--no-deps", "-e", str(ROOT)]):
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)
    return python


def found(named: str | None) -> Path | None:
    """The Python to measure with: the one named, $FLOWRL_ANCHORS_PYTHON, or that of `--prepare`; None for this one."""
    for path in (named, os.environ.get("FLOWRL_ANCHORS_PYTHON"), str(HERE / "bin" / "python")):
        if path is not None and Path(path).exists():
            return Path(path)
        if path is not None and path == named:
            raise SystemExit(f"there is no Python at {path}; make one with: python -m benchmarks.tables --prepare")
    return None


def run_again(python: Path, argv: list[str]) -> int:
    """The same benchmark with another Python."""
    command = [str(python), "-m", "benchmarks", "tables", *argv, "--here"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def is_this(python: Path) -> bool:
    """Whether it is the Python that runs this."""
    return Path(sys.prefix).resolve() == python.parent.parent.resolve()
