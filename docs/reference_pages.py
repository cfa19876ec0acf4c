"""A reference page for each public module, made while the site is built (a hook of mkdocs.yml).

A module is public when no part of its name starts with an underscore. Pages are read from docstrings by mkdocstrings
without importing the module, so the site builds where vLLM is missing.
"""

from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SOURCES = {"flowrl": ROOT / "flowrl", "flowrl_operators": ROOT / "operators" / "flowrl_operators"}

INDEX = """\
# Reference

{written}

The rest is made from the docstrings. What `import flowrl` gives is at the top; every other module is listed under its package.

{list}
"""


def modules(package: str, folder: Path) -> Iterator[str]:
    """The dotted names of the public modules below `folder`, the package itself first."""
    for file in sorted(folder.rglob("*.py"), key=lambda file: (file.parent, file.stem != "__init__", file.stem)):
        parts = [package, *file.relative_to(folder).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        if not any(part.startswith("_") for part in parts):
            yield ".".join(parts)


def pages() -> dict[str, list[str]]:
    """The modules of each package that exists."""
    return {package: list(modules(package, folder)) for package, folder in SOURCES.items() if folder.is_dir()}


def written() -> dict[str, str]:
    """Title by file of the reference pages written by hand."""
    files = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return {file.name: file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for file in files}


def on_config(config: MkDocsConfig) -> None:
    """Put the reference at the end of the navigation."""
    entries: list[object] = ["reference/index.md"]
    entries += [{title: f"reference/{file}"} for file, title in written().items()]
    for package, names in pages().items():
        entries.append({package: [{name: f"reference/{name}.md"} for name in names]})
    assert config.nav is not None
    config.nav.append({"Reference": entries})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    names = [name for names in pages().values() for name in names]
    listed = "\n".join(f"- [`{name}`]({name}.md)" for name in names)
    by_hand = "\n".join(f"- [{title}]({file})" for file, title in written().items())
    files.append(File.generated(config, "reference/index.md", content=INDEX.format(list=listed, written=by_hand)))
    for name in names:
        files.append(File.generated(config, f"reference/{name}.md", content=f"# `{name}`\n\n::: {name}\n"))
    return files
