"""Every operator and loss of the pack passes the conformance kit, as `flowrl_operators.conformance` tries them; a new one is
found by itself."""

from typing import Any

import pytest

from flowrl.graph import packs
from flowrl.testing import pack_cases
from flowrl_operators.conformance import CASES


def test_the_table_names_what_there_is() -> None:
    contents = packs.contents("core")
    assert contents.failures == {}
    assert CASES.keys() <= contents.operators.keys() | contents.losses.keys()


@pytest.mark.parametrize("case", pack_cases("core"), ids=str)
def test_conformance(case: Any) -> None:
    case.check()
