"""What does the heavy work. Engines are loaded by name, so that a torch-free install can trace, check and explain."""

from __future__ import annotations

import importlib

from flowrl.engines.protocol import Engine
from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest

ENGINES = {
    "null": "flowrl.engines.null:NullEngine",
    "torch": "flowrl.engines.host_torch:TorchEngine",
}
"""Engine name to `module:class`."""

REMARKS = {"null": "null engine: no model ran, and its numbers, the loss too, are made up"}
"""What whoever reads the numbers of an engine must know."""


def open_engine(name: str) -> Engine:
    """The engine of that name; its module is imported here and nowhere else."""
    if name not in ENGINES:
        raise ConfigError(f"there is no engine '{name}'; {nearest(name, ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), attribute)()
    return engine
