"""The fix for a data set that has what a flow reads under another name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from flowrl.schema.columns import Column
from flowrl.schema.standard import STANDARD


def how_to_rename(name: str, source: str, columns: Sequence[Column]) -> str:
    """What the data set of input `source` has, and how one of its columns becomes `name`.

    A column with a name the language knows is what that name says, and none that is asked for under another one.
    """
    has = ", ".join(repr(column.name) for column in columns)
    free = [column for column in columns if column.name not in STANDARD]
    near = difflib.get_close_matches(name, [column.name for column in free], n=1, cutoff=0.6)
    if name in STANDARD:
        free = [column for column in free if STANDARD[name].type.accepts(column.type)]
    meant = (*near, *(column.name for column in free))
    if not meant:
        return (
            f"the data set given for '{source}' has {has}, and none that could be '{name}'; add the column to the data"
        )
    return (
        f"the data set given for '{source}' has {has}; give one of them this name, e.g. "
        f'{source}=fr.Data(rows, columns={{"{name}": "{meant[0]}", ...}}) with all others to keep: new name to name in the data'
    )
