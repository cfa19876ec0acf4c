"""Run the tests of the adapters against packages whose requirements do not fit into the virtual environment.

    .venv/bin/python requirements/adapters.py [FOLDER] [NAME ...]

Each package gets an environment of its own in FOLDER (build/adapters), which sees the packages of this one behind its own.
What is there already is used again; the first time takes minutes.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = {
    # verl asks for engines that need a GPU: it is installed without what it asks for, and given what its import needs
    "verl": (
        ["--no-deps", "verl==0.9.1", "tensordict==0.15.3", "pyvers", "orjson", "ray", "msgpack", "omegaconf", "hydra-core",
         "antlr4-python3-runtime==4.9.3", "codetiming"],
        "tests/cpu/adapters/test_verl.py",
    ),
    # the third, tensorboard, is small and in .venv
    "trackers": (["mlflow-skinny==3.17.2", "wandb==0.31.0"], "tests/cpu/runtime/test_tracker_packages.py"),
    "verifiers-environments": (["verifiers==0.1.14"], "tests/cpu/adapters/test_verifiers.py"),
    "verifiers-tasks": (["verifiers==0.4.0"], "tests/cpu/adapters/test_verifiers.py"),
}  # fmt: skip


def made(folder: Path, packages: list[str]) -> Path:
    """The Python of an environment with these packages in front of those of this one."""
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists() or ready.read_text() != repr(packages):
        venv.create(folder, with_pip=True, clear=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([python, "-m", "pip", "install", *quiet, *packages], check=True)
        inside = next((folder / "lib").glob("python*")) / "site-packages"
        # sites of an environment come before what a .pth file appends
        behind = f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r})\n"
        (inside / "behind.pth").write_text(behind)
        ready.write_text(repr(packages))
    return python


def main(arguments: list[str]) -> int:
    """Exit status 1 when a test fails in any of them."""
    folder = Path(arguments[0]) if arguments else ROOT / "build" / "adapters"
    wanted = arguments[1:] or list(ENVIRONMENTS)
    failed = []
    for name in wanted:
        packages, tests = ENVIRONMENTS[name]
        python = made(folder / name, packages)
        print(f"== {name}: {' '.join(p for p in packages if not p.startswith('-'))}", flush=True)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "operators")])
        command = [python, "-m", "pytest", "-q", "-rs", "-p", "no:warnings", tests]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
