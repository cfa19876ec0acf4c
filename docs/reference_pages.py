"""The generated part of the reference, made while the site is built (a hook of mkdocs.yml): a page for each public module,
one of the names that `import flowrl` gives, and one of the standard columns.

A module is public when no part of its name starts with an underscore. Pages are read from docstrings by mkdocstrings
without importing the module, so the site builds where vLLM is missing. The two lists import `flowrl`, which needs no torch.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import flowrl
from flowrl.schema.standard import KEYS, LIVE, STANDARD

ROOT = Path(__file__).parents[1]
SOURCES = {"flowrl": ROOT / "flowrl", "flowrl_operators": ROOT / "operators" / "flowrl_operators"}

INDEX = """\
# Reference

{written}

- [What `import flowrl` gives](names.md)
- [Standard columns](columns.md)

The rest is made from the docstrings, a page per module.

{list}
"""

NAMES = """\
# What `import flowrl` gives

By convention `import flowrl as fr`. A name is loaded when it is first used, so the import is quick and brings no torch.

| name | what |
|---|---|
{rows}
"""

COLUMNS = """\
# Standard columns

An operator may write columns of any name. These are the ones the language's own nodes read and write. A parameter of an
operator with one of these names has its type without an annotation. The list is made from `flowrl.schema.standard`.

A type is a granularity and a dtype. `PROMPT`: one value per input row, equal for all its responses. `SAMPLE`: one per response.
`TURN` and `TOKEN`: a list per response. `[...]` is an inner length, `'*'` a list of its own length, `'k'` one that the
configuration says. Log-probabilities are in nats.

| column | type | from data | what |
|---|---|---|---|
{rows}

*From data*: a data set may bring it. {keys} are identities, which `select` always keeps.

## Live columns

What a model computes inside an update, with gradient. They exist in losses only and are never stored.

| column | type |
|---|---|
{live}
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


def names_page() -> str:
    """Every public name of `flowrl`, with the first line of its docstring and a link to where it is explained."""
    rows = []
    for module, names in flowrl._HOME.items():
        for name in names:
            value = getattr(flowrl, name)
            is_documented = inspect.isclass(value) or inspect.isroutine(value)
            link = f"{module}.md#{module}.{name}" if is_documented else f"{module}.md"
            first = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split()).replace("|", "\\|")
            rows.append(f"| [`{name}`]({link}) | {first} |")
    rows.append("| `__version__` | The installed version. |")
    return NAMES.format(rows="\n".join(rows))


def columns_page() -> str:
    """Every standard column with its type and meaning."""
    rows = (f"| `{c.name}` | `{c.type}` | {'yes' if c.from_data else ''} | {c.doc} |" for c in STANDARD)
    live = (f"| `{name}` | `{kind}` |" for name, kind in LIVE.items())
    keys = ", ".join(f"`{key}`" for key in KEYS)
    return COLUMNS.format(rows="\n".join(rows), keys=keys, live="\n".join(live))


def written() -> dict[str, str]:
    """Title by file of the reference pages written by hand."""
    files = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return {file.name: file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for file in files}


def on_config(config: MkDocsConfig) -> None:
    """Put the reference at the end of the navigation."""
    entries: list[object] = ["reference/index.md"]
    entries += [{title: f"reference/{file}"} for file, title in written().items()]
    entries += [{"What import flowrl gives": "reference/names.md"}, {"Standard columns": "reference/columns.md"}]
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
    files.append(File.generated(config, "reference/names.md", content=names_page()))
    files.append(File.generated(config, "reference/columns.md", content=columns_page()))
    for name in names:
        files.append(File.generated(config, f"reference/{name}.md", content=f"# `{name}`\n\n::: {name}\n"))
    return files
