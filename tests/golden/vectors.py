"""Golden vectors: what other systems' own code computed, one JSON file per piece and convention in `data/`.

A file has `rtol`, `atol` and `cases`; a case has `inputs`, `params`, `outputs` and may have tolerances of its own. Matrices are
[rows][columns]; masked positions hold garbage on purpose, in inputs and outputs.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fr

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    """One input with its answer."""

    name: str
    inputs: dict[str, Any]
    params: dict[str, Any]
    outputs: dict[str, Any]
    rtol: float
    atol: float

    def array(self, name: str) -> np.ndarray:
        """An input as float64."""
        return to_array(self.inputs[name])

    def wanted(self, name: str) -> np.ndarray:
        """An output as float64."""
        return to_array(self.outputs[name])

    def close(self, found: Any, wanted: Any, where: np.ndarray | None = None) -> None:
        """Assert |found - wanted| <= atol + rtol |wanted|, NaN equal to NaN, only `where` true."""
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        assert found.shape == wanted.shape
        if where is not None:
            found, wanted = found[where], wanted[where]
        np.testing.assert_allclose(found, wanted, rtol=self.rtol, atol=self.atol, equal_nan=True)


def to_array(values: Any) -> np.ndarray:
    """Nested lists in which text stands for nan, inf and -inf."""
    return np.asarray(values, dtype=object).astype(np.float64)


def cases(*files: str) -> Any:
    """Parametrise a test with (file, case) for every case of the named files."""
    found = [(file, case) for file in files for case in read(file)]
    return pytest.mark.parametrize(("file", "case"), found, ids=[f"{file}-{case.name}" for file, case in found])


def read(file: str) -> list[Case]:
    """The cases of a file in `data`."""
    return read_file(DATA / f"{file}.json")[2]


def read_file(path: Path) -> tuple[str, str, list[Case]]:
    """(piece, convention, cases) of a file anywhere."""
    whole = json.loads(path.read_text())
    cases = [
        Case(
            c["case"],
            c["inputs"],
            c["params"],
            c["outputs"],
            c.get("rtol", whole["rtol"]),
            c.get("atol", whole["atol"]),
        )
        for c in whole["cases"]
    ]
    return whole["piece"], whole["convention"], cases


def ragged(matrix: np.ndarray) -> fr.Ragged:
    """A matrix as rows of equal length; a mask tells what belongs to them."""
    return fr.Ragged(matrix.reshape(-1), np.arange(len(matrix) + 1) * matrix.shape[1])


def matrix(column: fr.Ragged) -> np.ndarray:
    """Rows of equal length as a matrix."""
    return column.values.reshape(len(column), -1)
