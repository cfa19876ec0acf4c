"""Run the code of a Markdown page, block after block, as a reader would.

    ```python                        runs; all blocks of a page share one namespace and one temporary folder
    ```python title="sums.py"        is also written to that file, for commands that name it
    ```toml title="run.toml"         is written to that file
    ```console                       lines after `$ flowrl` run in this process; what follows is what they print. What starts
                                     several processes (`$ torchrun`, --nproc, --launcher) runs beside it
    <!-- needs: module -->           the next block is left alone where that is not installed
    <!-- output -->                  the next block is what the python block before it prints
    <!-- no-run: reason -->          the next block is left alone

In expected output `...` stands for anything. A page's own files are called `flow.py` in what is printed.

    python -m tests.docs.pages docs/reference/checks.md      # writes what is printed now into the blocks that differ
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<head>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL)
NO_RUN = re.compile(r"<!-- no-run: (?P<reason>[^>]+?) -->\s*\Z")
NEEDS = re.compile(r"<!-- needs: (?P<module>\w+) -->\s*\Z")
SEVERAL = frozenset({"--nproc", "--launcher"})
"""Options with which a command starts processes of its own, whose output goes past `sys.stdout`."""
SECONDS = 600
"""For such a command, at most."""
OUTPUT = re.compile(r"<!-- output -->\s*\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    line: int
    """Of its first line of content, from 1."""
    language: str
    title: str
    text: str
    """Without the indentation of the fence."""
    skipped: str
    """Why it is not run, or empty."""
    is_output: bool
    """It says what the python block before it prints."""
    span: tuple[int, int]
    """Where its content lies in the page."""
    indent: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a block says is printed, and what was."""

    block: Block
    found: str
    """The whole text the block should have."""


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page in order."""
    for match in FENCE.finditer(page):
        language, _, rest = match["head"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        before = page[: match.start()]
        skipped = NO_RUN.search(before)
        reason = skipped["reason"] if skipped else ""
        needs = NEEDS.search(before)
        if needs and importlib.util.find_spec(needs["module"]) is None:
            reason = f"{needs['module']} is not installed"
        indent = match["indent"]
        text = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        yield Block(
            before.count("\n") + 2, language, title[1] if title else "", text, reason,
            OUTPUT.search(before) is not None, match.span("body"), indent,
        )  # fmt: skip


def matches(expected: str, found: str) -> bool:
    """Whether text is as expected; `...` stands for anything."""
    parts = (re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(".*".join(parts), found.strip(), re.DOTALL) is not None


def run_page(path: Path) -> list[Mismatch]:
    """Run a page in a temporary folder; returns the blocks whose output differs. Whatever a python block raises goes up."""
    page = path.read_text(encoding="utf-8")
    found: list[Mismatch] = []
    with _folder() as folder:
        module = ModuleType("docs_page")
        sys.modules[module.__name__] = module
        printed = ""
        for number, block in enumerate(blocks(page)):
            if block.skipped:
                continue
            if block.title:
                (folder / block.title).write_text(block.text, encoding="utf-8")
            if block.language == "python":
                printed = _run_python(block, folder / (block.title or f"block_{number}.py"), module)
            elif block.language == "console":
                found.extend(_run_console(block))
            elif block.is_output and not matches(block.text, printed):
                found.append(Mismatch(block, printed))
    return found


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A working directory with the examples in it; modules imported from it are forgotten afterwards."""
    here, path, known = Path.cwd(), list(sys.path), set(sys.modules)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        (folder / "examples").symlink_to(ROOT / "examples")
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(here)
            sys.path[:] = path
            for name in set(sys.modules) - known:
                file = getattr(sys.modules[name], "__file__", None)
                if name == "docs_page" or (file and Path(file).is_relative_to(folder)):
                    del sys.modules[name]


def _run_python(block: Block, file: Path, module: ModuleType) -> str:
    """What the block prints. What is behind a `__main__` guard is run, as by somebody who calls the file."""
    file.write_text(block.text, encoding="utf-8")
    called = block.text.replace('if __name__ == "__main__":', "if True:")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(called, str(file), "exec"), module.__dict__)
    return _plain(out.getvalue())


def _run_console(block: Block) -> Iterator[Mismatch]:
    said = []
    is_equal = True
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        arguments = shlex.split(command, comments=True)
        if arguments[:1] == ["torchrun"] or (arguments[:1] == ["flowrl"] and SEVERAL & set(arguments)):
            code, printed = _run_processes(arguments)
        elif arguments[:1] == ["flowrl"]:
            code, printed = _run_cli(arguments[1:])
        else:
            said.append(f"$ {part.rstrip()}")
            continue
        if code == 2 and not expected.strip():
            raise AssertionError(f"line {block.line}: {command}\n{printed}")
        is_equal &= not expected.strip() or matches(expected, printed)
        said.append(f"$ {command}\n{printed.rstrip()}" if expected.strip() else f"$ {command}")
    if not is_equal:
        yield Mismatch(block, "\n".join(said) + "\n")


def _run_cli(arguments: list[str]) -> tuple[int, str]:
    from flowrl.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(arguments)
    return code, _plain(out.getvalue())


MODULES = {"torchrun": "torch.distributed.run", "flowrl": "flowrl.cli"}


def _run_processes(arguments: list[str]) -> tuple[int, str]:
    """What the processes of a command print; when it fails, what they complain of too. Ray's cluster is one of its own."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", MODULES[arguments[0]], *arguments[1:]], capture_output=True, text=True, timeout=SECONDS,
        env={**given, "PYTHONPATH": paths, "RAY_ADDRESS": "local"}, check=False,
    )  # fmt: skip
    return done.returncode, _plain(done.stdout + (done.stderr[-3000:] if done.returncode else ""))


def _plain(text: str) -> str:
    """Printed text as a page shows it."""
    return re.sub(r"block_\d+\.py", "flow.py", text)


def pages() -> list[Path]:
    """README and every page of the site that is written by hand."""
    written = [ROOT / "README.md", ROOT / "operators" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in written if "results" not in page.parts]


def rewrite(path: Path) -> int:
    """Put what is printed now into the blocks that differ; how many did."""
    differing = run_page(path)
    page = path.read_text(encoding="utf-8")
    for mismatch in reversed(differing):
        start, end = mismatch.block.span
        lines = mismatch.found.rstrip("\n").splitlines(keepends=True)
        shown = "".join(mismatch.block.indent + line if line.strip() else line for line in lines)
        page = f"{page[:start]}{shown}\n{page[end:]}"
    path.write_text(page, encoding="utf-8")
    return len(differing)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for name in sys.argv[1:]:
        print(f"{name}: {rewrite(Path(name).resolve())} blocks rewritten")
