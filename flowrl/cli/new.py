"""`flowrl new pack NAME`: a pack to begin with, from the templates beside this file."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata, resources
from pathlib import Path

from flowrl.cli import OK
from flowrl.errors import ConfigError
from flowrl.graph import packs

FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "@module@/__init__.py": "init.py.txt",
    "@module@/advantages.py": "advantages.py.txt",
    "@module@/losses.py": "losses.py.txt",
    "tests/test_conformance.py": "test_conformance.py.txt",
    "tests/test_flow.py": "test_flow.py.txt",
    ".github/workflows/test.yml": "test.yml.txt",
    ".gitignore": "gitignore.txt",
}
"""Each file of a pack, and its template. `@name@` and `@module@` are the pack's."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def write_pack(name: str, into: Path) -> int:
    """Write the folder `flowrl-NAME`. Errors: ConfigError when the name or the folder is taken or no good."""
    module = f"flowrl_{name.replace('-', '_')}"
    _refuse_name(name, module)
    into = into.expanduser()
    if not into.is_dir():
        raise ConfigError(f"there is no folder '{into}' to write a pack into")
    folder = into / f"flowrl-{name}"
    if folder.exists():
        raise ConfigError(f"'{folder}' exists already; choose another name, or another folder with --into")
    templates = resources.files("flowrl.cli") / "templates" / "pack"
    for target, template in FILES.items():
        text = (templates / template).read_text(encoding="utf-8")
        path = folder / _filled(target, name, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(text, name, module), encoding="utf-8")
    print(
        f"wrote {folder}: the pack '{name}' (distribution flowrl-{name}, module {module}). Next:\n"
        f"  pip install -e '{folder}[dev]'\n"
        f"  pytest {folder}\n"
        f"  flowrl ops list --pack {name}"
    )
    return OK


def _filled(text: str, name: str, module: str) -> str:
    return text.replace("@name@", name).replace("@module@", module)


def _refuse_name(name: str, module: str) -> None:
    if name.startswith(("flowrl-", "flowrl_")):
        raise ConfigError(f"a pack is named without 'flowrl-', which its distribution begins with: {name[7:]}")
    if not _NAME.fullmatch(name):
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")
        hint = f"; '{plain}' would do" if _NAME.fullmatch(plain) else ""
        raise ConfigError(
            f"a pack's name is lower-case letters, digits and single hyphens, such as my-rewards; found {name!r}{hint}"
        )
    taken = {pack.name: pack for pack in packs.packs()}
    if name in taken:
        raise ConfigError(f"the name '{name}' is taken by an installed pack: {taken[name]}")
    try:
        version = metadata.version(f"flowrl-{name}")
    except metadata.PackageNotFoundError:
        version = ""
    if version or importlib.util.find_spec(module) is not None:
        what = f"distribution flowrl-{name} {version}" if version else f"module {module}"
        raise ConfigError(f"the name '{name}' is taken: the {what} is installed already")
