"""Settings: what a TOML file and the command line say about a run. Nothing in them is ever ignored.

    [run]                      steps, seed, engine
    [config]                   configuration of the flow
    [models.NAME]              fields of fr.Model; source may be FILE.py:FUNCTION
    [models.NAME.optimizer]    fields of fr.AdamW
    [data.NAME]                path, batch, shuffle, columns
    [options]                  fields of Options

A key that is misspelt, at the wrong level, of the wrong type or that nothing reads is an error that says where it is and
where it belongs; all of them are reported at once.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.model import AdamW, Model
from flowrl.recipe.typed import WrongType, convert, convert_text, differs, fields_of, parse_value
from flowrl.runtime.options import Options
from flowrl.schema.columns import nearest
from flowrl.schema.files import is_file, is_there, quoted

Path_ = tuple[str, ...]
"""Where a key is: `("models", "policy", "optimizer", "lr")`."""

RUN = {"steps": int, "seed": int, "engine": str}
DATA: dict[str, Any] = {"path": str, "batch": int | str, "shuffle": bool, "columns": dict[str, Any] | tuple[str, ...]}
MODEL = {name: kind for name, kind in fields_of(Model).items() if name != "optimizer"}
OPTIMIZER = fields_of(AdamW)
OPTIONS = fields_of(Options)

SECTIONS: dict[Path_, Mapping[str, Any]] = {
    ("run",): RUN,
    ("options",): OPTIONS,
    ("models", "NAME"): MODEL,
    ("models", "NAME", "optimizer"): OPTIMIZER,
    ("data", "NAME"): DATA,
}
"""Keys of every section with fixed keys. NAME stands for an input of the flow; [config] has the flow's own keys."""

OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "max_new_tokens": "max_tokens",
    "max_response_length": "max_tokens",
    "num_steps": "steps",
    "max_steps": "steps",
    "warmup": "warmup_steps",
    "grad_clip": "max_grad_norm",
    "clip_grad": "max_grad_norm",
    "dtype": "precision",
    "file": "path",
    "files": "path",
    "model_name_or_path": "source",
    "output_dir": "out",
    "lr_scheduler_type": "schedule",
}
"""What other projects call our keys, so that the suggestion is the right one."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a flow takes: the names that [config], [models.NAME] and [data.NAME] may use."""

    flow: str
    config: Mapping[str, Any]
    """Configuration value to default."""
    inputs: tuple[str, ...]
    is_configured: bool = False
    """A graph or a recipe whose configuration is settled, so that [config] cannot change it."""


@dataclass(frozen=True)
class Settings:
    """Checked for spelling, place and type; what nothing reads is found when they are applied to a graph."""

    run: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields of Model by input name; `optimizer` is a dict of fields of AdamW."""
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path_, str] = field(default_factory=dict)
    """Where each section and key was said: `run.toml:7`, `--model ref`."""
    base: Path | None = None
    """Folder that relative paths of the file are relative to."""

    def where(self, *path: str) -> str:
        """`run.toml:7: [models.ref]` for errors."""
        said = self.origins.get(path, "")
        return said if said.startswith("--") else f"{said}: [{'.'.join(path)}]" if said else f"[{'.'.join(path)}]"

    def over(self, base: Settings) -> Settings:
        """These settings laid over `base`: single keys win, the others stay."""
        models = {
            name: _laid(base.models.get(name, {}), self.models.get(name, {})) for name in {**base.models, **self.models}
        }
        data = {name: {**base.data.get(name, {}), **self.data.get(name, {})} for name in {**base.data, **self.data}}
        return Settings(
            {**base.run, **self.run}, {**base.config, **self.config}, models, data,
            {**base.options, **self.options}, {**base.origins, **self.origins}, base.base or self.base,
        )  # fmt: skip


def read_settings(path: str | Path, names: Names) -> Settings:
    """Read a TOML file.

    Errors: ConfigError with every problem of the file: syntax with line and column, or for each key what is wrong with it.
    """
    file = Path(path)
    if not is_file(file):
        raise ConfigError(f"there is no settings file {quoted(path)}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file '{path}' cannot be read as UTF-8 text: {error}") from error
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {_with_place(str(error), text)}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: nested too deep, or a number of thousands of digits") from error
    reader = _Reader(str(path), lines_of(text), names, raw)
    settings = reader.read()
    reader.refuse()
    return replace(_resolved(settings, file.parent), base=file.parent)


def settings_of_arguments(
    names: Names,
    *,
    run: Mapping[str, Any] | None = None,
    config: Iterable[str] = (),
    models: Iterable[str] = (),
    data: Iterable[str] = (),
    options: Iterable[str] = (),
) -> Settings:
    """What the command line says, each item as `NAME=VALUE`, checked like a file."""
    reader = _Reader("", {}, names, {})
    found = Settings(run={k: v for k, v in (run or {}).items() if v is not None})
    for option, items in (("--config", config), ("--model", models), ("--data", data), ("--set", options)):
        for item in items:
            name, _, value = item.partition("=")
            name = name.strip()
            if not name or "=" not in item:
                reader.problems.append(f"{option} takes NAME=VALUE; found {item!r}")
                continue
            reader.argument(found, option, name, value)
    reader.refuse()
    return found


def lines_of(text: str) -> dict[Path_, int]:
    """Line of each section header and of each plain key of a TOML text, as far as a line tells (tomllib tells nothing)."""
    found: dict[Path_, int] = {}
    section: Path_ = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = re.fullmatch(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?", line)
        key = re.match(r"\s*([\w\-.\"']+)\s*=", line)
        if header is not None:
            section = _dotted(header.group(1))
            for depth in range(1, len(section) + 1):
                found.setdefault(section[:depth], number)
        elif key is not None:
            full = (*section, *_dotted(key.group(1)))
            for depth in range(len(section) + 1, len(full) + 1):
                found.setdefault(full[:depth], number)
    return found


def _dotted(text: str) -> Path_:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _with_place(message: str, text: str) -> str:
    """tomllib's message always with line and column; at the end of the file it gives neither."""
    if "(at end of document)" not in message:
        return message
    lines = text.splitlines() or [""]
    return message.replace(
        "at end of document", f"at line {len(lines)}, column {len(lines[-1]) + 1}, the end of the file"
    )


class _Reader:
    """Walks the sections of one file, collecting problems."""

    def __init__(self, file: str, lines: dict[Path_, int], names: Names, raw: dict[str, Any]) -> None:
        self.file = file
        self.lines = lines
        self.names = names
        self.raw = raw
        self.problems: list[str] = []
        self.origins: dict[Path_, str] = {}

    def refuse(self) -> None:
        """Raise everything found, if anything."""
        if len(self.problems) == 1:
            raise ConfigError(self.problems[0])
        if self.problems:
            raise ConfigError(
                f"{len(self.problems)} problems in the settings:\n" + "\n".join(f"- {p}" for p in self.problems)
            )

    def problem(self, path: Path_, text: str) -> None:
        line = self.lines.get(path) or self.lines.get(path[:-1])
        self.problems.append(f"{self.file}:{line}: {text}" if line else f"{self.file}: {text}")

    def note(self, path: Path_) -> None:
        line = self.lines.get(path) or self.lines.get(path[:-1])
        self.origins[path] = f"{self.file}:{line}" if line else self.file

    def read(self) -> Settings:
        known = ("run", "config", "models", "data", "options")
        for key, value in self.raw.items():
            if key not in known:
                self.unknown_top(key, value)
            elif not isinstance(value, dict):
                self.problem((key,), f"'{key}' is a section; write [{key}]; found {key} = {value!r}")
        section = {key: self.raw[key] if isinstance(self.raw.get(key), dict) else {} for key in known}
        return Settings(
            run=self.fields(("run",), section["run"], RUN),
            config=self.config(section["config"]),
            models={name: self.model(name, found) for name, found in self.named("models", section["models"])},
            data={
                name: self.fields(("data", name), found, DATA) for name, found in self.named("data", section["data"])
            },
            options=self.fields(("options",), section["options"], OPTIONS),
            origins=self.origins,
        )

    def named(self, top: str, found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """The sections [models.NAME] or [data.NAME] whose NAME is an input of the flow."""
        kept = []
        for name, value in found.items():
            path = (top, name)
            if not isinstance(value, dict):
                what = "model" if top == "models" else "data set"
                self.problem(
                    path,
                    f"[{top}] holds a section for each {what}; {self.belongs(name) or f'found {name} = {value!r}'}",
                )
            elif name not in self.names.inputs:
                hint = nearest(name, self.names.inputs)
                self.problem(
                    path, f"[{top}.{name}]: flow '{self.names.flow}' has no input '{name}', so nothing reads it; {hint}"
                )
            else:
                self.note(path)
                kept.append((name, value))
        return kept

    def model(self, name: str, raw: dict[str, Any]) -> dict[str, Any]:
        path = ("models", name)
        found = self.fields(path, {key: value for key, value in raw.items() if key != "optimizer"}, MODEL)
        if "optimizer" in raw:
            optimizer = raw["optimizer"]
            if isinstance(optimizer, dict):
                self.note((*path, "optimizer"))
                found["optimizer"] = self.fields((*path, "optimizer"), optimizer, OPTIMIZER)
            else:
                self.problem(
                    (*path, "optimizer"), f"'optimizer' in [models.{name}] is a section: [models.{name}.optimizer]"
                )
        return found

    def fields(self, path: Path_, raw: dict[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of one section, each known and of its type."""
        found = {}
        for key, value in raw.items():
            if key not in kinds:
                self.problem((*path, key), f"unknown key '{key}' in [{'.'.join(path)}]; {self.suggestion(key, path)}")
                continue
            try:
                found[key] = convert(value, kinds[key])
                self.note((*path, key))
            except WrongType as error:
                self.problem((*path, key), f"'{key}' in [{'.'.join(path)}] is {error}; found {value!r}")
        return found

    def config(self, raw: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for key, value in raw.items():
            wrong = self.config_problem(key, value, "in [config]")
            if wrong:
                self.problem(("config", key), wrong)
            else:
                self.note(("config", key))
                found[key] = value
        return found

    def config_problem(self, key: str, value: Any, where: str) -> str:
        """What is wrong with one configuration value; empty when nothing is."""
        if self.names.is_configured:
            fixed = f"flow '{self.names.flow}' is already configured, so nothing reads it"
            return f"'{key}' {where}: {fixed}; change it where the graph is made"
        if key not in self.names.config:
            if key in self.names.inputs:
                hint = f"it is an input: [models.{key}] or [data.{key}], --model or --data"
            else:
                hint = self.suggestion(key, ("config",))
            return f"unknown key '{key}' {where}: flow '{self.names.flow}' has no such configuration; {hint}"
        wrong = differs(value, self.names.config[key])
        default = self.names.config[key]
        return f"'{key}' {where} is {wrong}, as its default {default!r}; found {value!r}" if wrong else ""

    def argument(self, found: Settings, option: str, name: str, value: str) -> None:
        """One NAME=VALUE of the command line."""
        if option == "--config":
            parsed = parse_value(value)
            default = self.names.config.get(name)
            parsed = value if isinstance(default, str) and not isinstance(parsed, str) else parsed
            wrong = self.config_problem(name, parsed, "of --config")
            found.config[name] = parsed
            self.problems.extend([wrong] if wrong else [])
        elif option == "--set":
            self.option(found, name, value)
        elif name not in self.names.inputs:
            hint = nearest(name, self.names.inputs)
            self.problems.append(f"{option} {name}: flow '{self.names.flow}' has no input '{name}'; {hint}")
        else:
            top, key, kept = ("models", "source", found.models) if option == "--model" else ("data", "path", found.data)
            kept[name] = {key: value}
            found.origins[(top, name)] = found.origins[(top, name, key)] = f"{option} {name}"

    def option(self, found: Settings, name: str, value: str) -> None:
        if name not in OPTIONS:
            hint = f"--{name} is an option of its own" if name in RUN else self.suggestion(name, ("options",))
            self.problems.append(f"--set {name}: there is no option '{name}'; {hint}")
            return
        try:
            found.options[name] = convert_text(value, OPTIONS[name])
        except WrongType as error:
            self.problems.append(f"--set {name} is {error}; found {value!r}")

    def unknown_top(self, key: str, value: Any) -> None:
        if isinstance(value, dict):
            self.problem((key,), f"unknown section [{key}]; {self.section_hint(key, value)}")
        else:
            hint = (
                self.belongs(key) or "every key is in a section: [run], [config], [models.NAME], [data.NAME], [options]"
            )
            self.problem((key,), f"key '{key}' is at the top level, where nothing reads it; {hint}")

    def section_hint(self, key: str, value: dict[str, Any]) -> str:
        if key in self.names.inputs:
            is_data = set(value) <= set(DATA) and bool(value)
            return f"did you mean [{'data' if is_data else 'models'}.{key}]?"
        if key == "optimizer":
            return f"an optimizer belongs to a model: [{self.shown(('models', 'NAME', 'optimizer'))}]"
        alias = {"model": "models", "flow": "config", "option": "options", "dataset": "data", "datasets": "data"}
        known = ("run", "config", "models", "data", "options")
        return f"did you mean [{alias[key]}]?" if key in alias else nearest(key, known)

    def suggestion(self, key: str, path: Path_) -> str:
        """What to write instead of an unknown key: the nearest of its section, or the section that has it."""
        here = self.names.config if path == ("config",) else SECTIONS[_pattern(path)]
        plain = key.replace("-", "_")
        if plain != key and plain in here:
            return f"write '{plain}', with an underscore"
        near = difflib.get_close_matches(plain, here, n=1, cutoff=0.8)
        if near or _other_name(plain) in here:
            return f"did you mean '{near[0] if near else _other_name(plain)}'?"
        return self.belongs(key, beside=path) or nearest(plain, here)

    def belongs(self, key: str, beside: Path_ = ()) -> str:
        """Where a key that is known in other sections belongs; empty when no section has it or one like it."""
        plain = key.replace("-", "_")
        for name in dict.fromkeys((plain, _other_name(plain))):
            if not name:
                continue
            homes = [self.shown(path) for path, kinds in SECTIONS.items() if name in kinds and path != _pattern(beside)]
            if name in self.names.config and beside != ("config",):
                homes.insert(0, "config")
            if homes:
                it = f"'{name}'" if name != key else "it"
                return f"{it} belongs in " + " or ".join(f"[{home}]" for home in homes)
        everything = {name for kinds in (*SECTIONS.values(), self.names.config) for name in kinds}
        hint = nearest(plain, everything)
        if beside or not hint.startswith("did you mean"):
            return ""
        close = hint.split("'")[1]
        return f"{hint} {self.belongs(close)}"

    def shown(self, path: Path_) -> str:
        """A section with the only name it can have in place of NAME."""
        if "NAME" not in path:
            return ".".join(path)
        said = self.raw.get(path[0])
        names = [n for n in said if isinstance(said[n], dict)] if isinstance(said, dict) else []
        if path[-1] == "optimizer" and len(names) > 1:
            names = [n for n in names if "optimizer" in said[n]] if isinstance(said, dict) else []
        return ".".join(path).replace("NAME", names[0] if len(names) == 1 else "NAME")


def _pattern(path: Path_) -> Path_:
    """`("models", "policy", "optimizer")` -> `("models", "NAME", "optimizer")`."""
    return (path[0], "NAME", *path[2:]) if len(path) > 1 else path


def _other_name(key: str) -> str:
    """Our name of a key that other projects call differently, misspelt or not."""
    hint = nearest(key, OTHER_NAMES)
    close = hint.split("'")[1] if hint.startswith("did you mean") else ""
    return OTHER_NAMES.get(close, "")


def _laid(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Fields of a model over others; the optimizer key by key."""
    found = {**base, **over}
    if "optimizer" in base and "optimizer" in over:
        found["optimizer"] = {**base["optimizer"], **over["optimizer"]}
    return found


def _resolved(settings: Settings, base: Path) -> Settings:
    """Relative paths made relative to the settings file instead of the working directory."""
    data = {
        name: {**found, "path": str(base / Path(found["path"]).expanduser())} if "path" in found else found
        for name, found in settings.data.items()
    }
    options = dict(settings.options)
    if isinstance(options.get("out"), str):
        options["out"] = str(base / Path(options["out"]).expanduser())
    models = {}
    for name, found in settings.models.items():
        moved = {key: _moved(found[key], base) for key in ("source", "tokenizer") if isinstance(found.get(key), str)}
        models[name] = {**found, **moved}
    return replace(settings, data=data, options=options, models=models)


def _moved(text: str, base: Path) -> str:
    """A model's source: a path when it is spelt as one or exists beside the file, else a name and left alone."""
    file, colon, name = text.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{base / Path(file).expanduser()}:{name}"
    is_path = text.startswith((".", "/", "~")) or is_there(base / text)
    return str((base / Path(text).expanduser()).absolute()) if is_path else text
