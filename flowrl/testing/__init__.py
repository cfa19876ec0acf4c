"""The conformance kit: one call checks that an operator, a loss or a whole pack keeps what FlowRL relies on.

    from flowrl.testing import check_loss, check_operator, check_pack

    def test_my_advantage():
        check_operator(my_advantage, config=[{}, {"scale": 0.5}])

    def test_my_loss():
        check_loss(my_loss, stop_gradient="the ratio is a weight")

    def test_everything_in_my_pack():
        check_pack("my_pack")

With pytest, one test for each property:

    @pytest.mark.parametrize("case", pack_cases("my_pack"), ids=str)
    def test_conformance(case):
        case.check()

Inputs are made from what is read: by type, and by name where a standard column has a meaning (masks, log-probabilities,
group keys). A failure names the property, the smallest input that shows it, what was expected and what was found.

What a function cannot do needs no test: it is given only the columns it declares, and a loss only the tokens that train.
"""

from flowrl.testing._cases import (
    Case,
    check_loss,
    check_operator,
    check_pack,
    loss_cases,
    operator_cases,
    pack_cases,
)
from flowrl.testing._findings import ConformanceError
from flowrl.testing._inputs import WIDTH

__all__ = [
    "WIDTH",
    "Case",
    "ConformanceError",
    "check_loss",
    "check_operator",
    "check_pack",
    "loss_cases",
    "operator_cases",
    "pack_cases",
]
