"""How notebooks show graphs, tables and runs: by pictures that are drawn far above what is shown.

    class Graph:
        def _repr_html_(self) -> str:
            return shown("graph", self)

What is shown knows nobody who draws; this table holds names only, and a module is imported when something is to be seen.
"""

from __future__ import annotations

import importlib
from typing import Any

SHOWN = {
    "graph": "flowrl.viz.notebook:graph_html",
    "flow": "flowrl.viz.notebook:flow_html",
    "rows": "flowrl.viz.notebook:rows_html",
    "table": "flowrl.viz.notebook:table_html",
    "run": "flowrl.viz.run.page:run_notebook",
    "metrics": "flowrl.viz.notebook:metrics_html",
}
"""Kind of thing -> `module:function`, called with it; it returns HTML."""


def shown(kind: str, value: Any) -> str:
    """HTML of a thing, for a notebook."""
    module, _, function = SHOWN[kind].partition(":")
    return str(getattr(importlib.import_module(module), function)(value))
