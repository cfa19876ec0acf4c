"""Losses of preferences: symmetry, what a margin of 0 gives, any order of rows, extremes, what is refused."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flowrl as fr
from flowrl.engines.segments import Segments
from flowrl.errors import ConfigError, DataError, OperatorError
from flowrl_operators import advantages, losses

F64 = torch.float64
SMOOTHING = {"exo": 0.05, "robust": 0.1}


def term(kind: str, **options: object) -> fr.Loss:
    return losses.dpo(kind=kind, label_smoothing=SMOOTHING.get(kind, 0.0), **options)


PAIRED = {
    **{kind: term(kind) for kind in losses.DPO_KINDS},
    "cdpo": losses.dpo(label_smoothing=0.1),
    **{name: losses.dpo(divergence=name) for name in losses.DIVERGENCES},
    "dpo_mean": losses.dpo(reduce="mean"),
    "ipo_loss": losses.ipo(),
    "ipo_mean": losses.ipo(reduce="mean"),
    "aot": losses.aot(),
    "aot_unpaired": losses.aot(paired=False),
    **{f"cpo_{kind}": losses.cpo(kind=kind) for kind in losses.CPO_KINDS},
    "simpo": losses.simpo(),
    "alphapo": losses.simpo(alpha=0.25),
    "orpo": losses.orpo(),
    "nll": losses.chosen_nll(),
    "nll_sum": losses.chosen_nll(reduce="sum"),
    "bco": losses.bco(),
    "kto": losses.kto(baseline=None),
}


def batch(num_pairs: int = 4, width: int = 5, seed: int = 0) -> tuple[dict[str, object], Tensor]:
    """Pairs in two blocks; every row has a token that trains."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * num_pairs
    columns: dict[str, object] = {
        "logprobs": -3 * torch.rand(rows, width, generator=generator, dtype=F64),
        "ref_logprobs": -3 * torch.rand(rows, width, generator=generator, dtype=F64),
        "chosen": torch.arange(rows) < num_pairs,
        "pair_id": [f"p{row % num_pairs}" for row in range(rows)],
    }
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[:, 0] = True
    return columns, mask


def evaluated(loss: fr.Loss, columns: dict[str, object], mask: Tensor) -> tuple[float, Tensor, dict[str, float]]:
    live = columns["logprobs"].clone().requires_grad_()  # type: ignore[attr-defined]
    value, metrics = fr.apply_loss(loss, {**columns, "logprobs": live}, mask)
    (gradient,) = torch.autograd.grad(value, live)
    return value.item(), gradient, metrics


def one_pair(chosen: float, rejected: float, dtype: torch.dtype = F64) -> tuple[dict[str, object], Tensor]:
    """Two responses of one token with these log-ratios, the reference at -1 each."""
    columns: dict[str, object] = {
        "logprobs": torch.tensor([[chosen - 1], [rejected - 1]], dtype=dtype),
        "ref_logprobs": torch.tensor([[-1.0], [-1.0]], dtype=dtype),
        "chosen": torch.tensor([True, False]),
        "pair_id": ["p", "p"],
    }
    return columns, torch.ones(2, 1)


@pytest.mark.parametrize("name", PAIRED)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), order=st.permutations(range(8)))
def test_order_of_rows_and_padding_change_nothing(name: str, seed: int, order: list[int]) -> None:
    columns, mask = batch(seed=seed)
    value, gradient, metrics = evaluated(PAIRED[name], columns, mask)
    index = torch.tensor(order)
    moved = {
        key: column[index] if isinstance(column, Tensor) else [column[i] for i in order]  # type: ignore[index]
        for key, column in columns.items()
    }
    for key in ("logprobs", "ref_logprobs"):  # garbage where nothing trains, and a column more of it
        moved[key] = torch.nn.functional.pad(moved[key].masked_fill(~mask[index], math.nan), (0, 1), value=math.inf)
    wide = torch.nn.functional.pad(mask[index], (0, 1), value=False)
    again, slope, reported = evaluated(PAIRED[name], moved, wide)
    assert again == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(slope[:, :-1], gradient[index], rtol=1e-12, atol=1e-14)
    assert reported == pytest.approx(metrics, rel=1e-12)


AT_ZERO = {
    "sigmoid": math.log(2), "robust": math.log(2), "cdpo": math.log(2), "hinge": 1.0, "ipo": 25.0, "nca": 2 * math.log(2),
    "sppo": 50.0, "apo_zero": 1.0, "apo_down": 1.0, "discopop": (math.log(2) + 1) / 2, "aot": math.log(2), "bco": math.log(2),
    "exo": -math.log(2) - (math.log(0.95) + math.log(0.05)) / 2, "kto": 0.5, "forward_kl": math.log(2), "js": math.log(2),
    "alpha": math.log(2), "dpo_mean": math.log(2),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_ZERO)
def test_value_where_policy_and_reference_agree(name: str) -> None:
    value, _, _ = evaluated(PAIRED[name], *one_pair(0.0, 0.0))
    assert value == pytest.approx(AT_ZERO[name], rel=1e-6)


def test_value_of_the_reference_free_ones_where_both_are_as_likely() -> None:
    columns, mask = one_pair(0.0, 0.0)
    found = {
        name: evaluated(PAIRED[name], columns, mask)[0] for name in ("cpo_sigmoid", "cpo_hinge", "simpo", "orpo", "nll")
    }
    wanted = {
        "cpo_sigmoid": math.log(2),
        "cpo_hinge": 1.0,
        "simpo": math.log1p(math.exp(0.5)),
        "orpo": 0.1 * math.log(2),
        "nll": 1.0,
    }
    assert found == pytest.approx(wanted)


RISES_AND_FALLS = [name for name in PAIRED if name not in ("apo_down", "nll", "nll_sum", "discopop", "sppo", "nca")]


@pytest.mark.parametrize("name", RISES_AND_FALLS)
@pytest.mark.parametrize("lead", [-1.5, -0.2, 0.0, 0.2, 1.5])
def test_a_step_raises_the_chosen_response_and_lowers_the_rejected_one(name: str, lead: float) -> None:
    columns, mask = one_pair(lead / 2 - 1, -lead / 2 - 1)
    _, gradient, _ = evaluated(PAIRED[name], columns, mask)
    assert gradient[0].item() < 0 < gradient[1].item()


def test_apo_down_lowers_both_and_nca_holds_the_chosen_one() -> None:
    columns, mask = one_pair(0.0, 0.0)
    apart, _ = one_pair(30.0, -30.0)
    assert (evaluated(PAIRED["apo_down"], apart, mask)[1] > 0).all()
    far, _ = one_pair(30.0, 30.0)
    assert evaluated(PAIRED["nca"], far, mask)[1][0].item() > 0  # too far above the reference: back down
    _, nll, _ = evaluated(PAIRED["nll"], columns, mask)
    assert nll[0].item() < 0 and nll[1].item() == 0


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_values_and_gradients_are_finite_however_far_apart(name: str, size: float, dtype: torch.dtype) -> None:
    for chosen, rejected in ((size, -size), (size, size), (size, 0.0), (0.0, size)):
        columns, mask = one_pair(chosen, rejected, dtype)
        if name.startswith(("cpo", "simpo", "alphapo", "orpo", "nll")):  # these read log-probabilities: never above 0
            columns["logprobs"] = columns["logprobs"].clamp(max=0.0)  # type: ignore[attr-defined]
        value, gradient, metrics = evaluated(PAIRED[name], columns, mask)
        assert math.isfinite(value) and gradient.isfinite().all(), (chosen, rejected)
        assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("name", PAIRED)
def test_gradients_are_those_of_the_value(name: str) -> None:
    columns, mask = batch(num_pairs=2, width=3, seed=3)

    def value(live: Tensor) -> Tensor:
        return fr.apply_loss(PAIRED[name], {**columns, "logprobs": live}, mask)[0]

    assert torch.autograd.gradcheck(value, columns["logprobs"].clone().requires_grad_())  # type: ignore[attr-defined]


SWAPPED = ("sigmoid", "cdpo", "robust", "ipo", "cpo_sigmoid", "ipo_loss")


@pytest.mark.parametrize("name", SWAPPED)
def test_swapping_a_pair_negates_its_margin(name: str) -> None:
    columns, mask = batch()
    _, _, metrics = evaluated(PAIRED[name], columns, mask)
    swapped = {**columns, "chosen": ~columns["chosen"]}  # type: ignore[operator]
    _, _, other = evaluated(PAIRED[name], swapped, mask)
    assert other["preference_margin"] == pytest.approx(-metrics["preference_margin"])
    assert other["preference_accuracy"] == pytest.approx(1 - metrics["preference_accuracy"])
    assert other["chosen_reward"] == pytest.approx(metrics["rejected_reward"])


def test_smoothing_by_a_half_cannot_tell_the_rows_of_a_pair() -> None:
    columns, mask = batch()
    half = losses.dpo(label_smoothing=0.5)
    swapped = {**columns, "chosen": ~columns["chosen"]}  # type: ignore[operator]
    assert evaluated(half, columns, mask)[0] == pytest.approx(evaluated(half, swapped, mask)[0])


def test_robust_dpo_is_unbiased_under_flipped_labels() -> None:
    """(1 - e) of the loss of a pair plus e of the flipped pair's is the loss without flips."""
    columns, mask = batch()
    swapped = {**columns, "chosen": ~columns["chosen"]}  # type: ignore[operator]
    robust = losses.dpo(kind="robust", label_smoothing=0.2)
    mean = 0.8 * evaluated(robust, columns, mask)[0] + 0.2 * evaluated(robust, swapped, mask)[0]
    assert mean == pytest.approx(evaluated(losses.dpo(), columns, mask)[0])


def test_same_loss_under_two_names() -> None:
    columns, mask = batch()
    assert evaluated(losses.ipo(0.3), columns, mask)[0] == evaluated(losses.dpo(0.3, kind="ipo"), columns, mask)[0]
    zeros = {**columns, "ref_logprobs": torch.zeros_like(columns["ref_logprobs"])}  # type: ignore[arg-type]
    cpo, dpo = losses.cpo(0.3, label_smoothing=0.1), losses.dpo(0.3, label_smoothing=0.1)
    assert evaluated(cpo, columns, mask)[0] == pytest.approx(evaluated(dpo, zeros, mask)[0])
    near = losses.dpo(divergence="alpha", alpha=1 + 1e-5)
    assert evaluated(near, columns, mask)[0] == pytest.approx(evaluated(losses.dpo(), columns, mask)[0], rel=1e-3)
    small = evaluated(losses.simpo(alpha=1e-6), columns, mask)[0]
    assert small == pytest.approx(evaluated(losses.simpo(), columns, mask)[0], rel=1e-4)


def test_a_mean_over_tokens_does_not_see_how_often_a_response_is_repeated() -> None:
    columns, mask = batch()
    twice = {
        key: torch.cat([column, column], 1) if isinstance(column, Tensor) and column.dim() == 2 else column
        for key, column in columns.items()
    }
    double = torch.cat([mask, mask], 1)
    for name in ("dpo_mean", "ipo_mean", "simpo", "orpo", "nll"):
        assert evaluated(PAIRED[name], twice, double)[0] == pytest.approx(evaluated(PAIRED[name], columns, mask)[0])
    assert evaluated(PAIRED["sigmoid"], twice, double)[0] != pytest.approx(
        evaluated(PAIRED["sigmoid"], columns, mask)[0]
    )


def test_half_precision_is_summed_wide() -> None:
    """1,000 tokens of 0.01: bfloat16 alone would stop growing."""
    live = torch.full((2, 1000), 0.0, dtype=torch.bfloat16)
    live[0] = 0.01
    columns = {
        "logprobs": live,
        "ref_logprobs": torch.zeros_like(live),
        "chosen": torch.tensor([True, False]),
        "pair_id": ["p", "p"],
    }
    _, metrics = fr.apply_loss(losses.dpo(1.0), columns, torch.ones(2, 1000))
    assert metrics["preference_margin"] == pytest.approx(10.0, rel=2e-3)


def test_micro_batches_of_whole_pairs_add_up() -> None:
    from flowrl.engines.averages import Totals

    columns, mask = batch(num_pairs=4)
    whole = evaluated(losses.dpo() + 0.5 * losses.chosen_nll(), columns, mask)[0]
    parts = 0.0
    for pairs in ([0], [1, 2, 3]):
        rows = torch.tensor(pairs + [pair + 4 for pair in pairs])
        part = {
            key: column[rows] if isinstance(column, Tensor) else [column[i] for i in rows.tolist()]  # type: ignore[index]
            for key, column in columns.items()
        }
        totals = Totals(num_tokens=int(mask.sum()), num_rows=8)
        loss = losses.dpo() + 0.5 * losses.chosen_nll()
        parts += fr.apply_loss(loss, part, mask[rows], totals=totals)[0].item()
    assert parts == pytest.approx(whole)


def test_optimal_transport_compares_sorted_numbers() -> None:
    columns, mask = batch(num_pairs=2, width=1)
    columns["logprobs"] = torch.tensor([[-1.0], [-3.0], [-2.0], [-2.0]], dtype=F64)  # margins 1, -1
    columns["ref_logprobs"] = torch.tensor([[-4.0], [-1.0], [-2.0], [-2.0]], dtype=F64)  # margins -2, 1
    value, _, _ = evaluated(losses.aot(1.0), columns, mask[:, :1])
    wanted = torch.nn.functional.softplus(-torch.tensor([-1.0 + 2.0, 1.0 - 1.0])).mean().item()
    assert value == pytest.approx(wanted)
    value, _, _ = evaluated(losses.aot(1.0, paired=False), columns, mask[:, :1])
    wanted = torch.nn.functional.softplus(-torch.tensor([-2.0 - 0.0, 3.0 - 0.0])).mean().item()
    assert value == pytest.approx(wanted)


def test_unpaired_transport_needs_no_pairs_but_as_many_of_both() -> None:
    columns, mask = batch()
    del columns["pair_id"]
    assert math.isfinite(evaluated(losses.aot(paired=False), columns, mask)[0])
    with pytest.raises(OperatorError, match="needs the column 'pair_id'"):
        fr.apply_loss(losses.aot(), columns, mask)
    columns["chosen"] = torch.tensor([True] * 3 + [False] * 5)
    with pytest.raises(OperatorError, match="as many chosen rows as rejected ones .* found 3 and 5"):
        fr.apply_loss(losses.aot(paired=False), columns, mask)


@pytest.mark.parametrize("name", [n for n in PAIRED if n not in ("kto", "bco", "aot_unpaired")])
def test_a_torn_pair_is_refused(name: str) -> None:
    columns, mask = batch()
    torn = {key: column[:-1] for key, column in columns.items()}  # type: ignore[index]
    with pytest.raises(
        OperatorError, match="one chosen and one rejected row per pair_id; 1 of 4 pairs have one row.*'p3'"
    ):
        fr.apply_loss(PAIRED[name], torn, mask[:-1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.dpo(kind="sigmod"), "knows the kinds sigmoid, robust.*found 'sigmod'"),
        (lambda: losses.dpo(0.0), "needs beta > 0; found beta=0.0"),
        (lambda: losses.dpo(reduce="max"), "reduce='sum' or reduce='mean'.*found 'max'"),
        (lambda: losses.dpo(divergence="tv"), "divergences reverse_kl, forward_kl, js, alpha; found 'tv'"),
        (
            lambda: losses.dpo(kind="hinge", label_smoothing=0.1),
            "label_smoothing is for the kinds sigmoid, robust, exo",
        ),
        (lambda: losses.dpo(kind="exo"), "between 0 and 1 .usually 1e-3. for kind='exo'"),
        (lambda: losses.dpo(kind="robust", label_smoothing=0.5), "under 0.5 for kind='robust'"),
        (lambda: losses.dpo(kind="discopop", tau=0.0), "tau > 0 for kind='discopop'"),
        (lambda: losses.dpo(label_smoothing=1.5), "0 <= label_smoothing < 1; found label_smoothing=1.5"),
        (lambda: losses.cpo(kind="nca"), "cpo knows the kinds sigmoid, hinge, ipo"),
        (lambda: losses.cpo(kind="hinge", label_smoothing=0.1), "the first with label_smoothing"),
        (lambda: losses.dpo(label_smoothing=0.5, beta=-1.0), "needs beta > 0"),
        (lambda: losses.kto(beta=0.0), "kto needs beta > 0"),
        (lambda: losses.chosen_nll(reduce="max"), "chosen_nll: .*found 'max'"),
        (lambda: losses.bradley_terry(center=-1.0), "center >= 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Callable[[], fr.Loss], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (losses.kto(), "compares with the column 'kl_baseline'.*kto_baseline writes one"),
        (losses.bco(shift="mean_reward"), "compares with the column 'mean_reward'"),
    ],
)
def test_a_missing_column_is_refused(loss: fr.Loss, message: str) -> None:
    columns, mask = batch()
    with pytest.raises(OperatorError, match=message):
        fr.apply_loss(loss, columns, mask)


def test_kto_weighs_good_and_bad_rows_against_the_reference_point() -> None:
    columns, mask = one_pair(2.0, 2.0)
    columns["kl_baseline"] = torch.tensor([0.5, 0.5], dtype=F64)
    loss = losses.kto(1.0, desirable_weight=1.0, undesirable_weight=3.0)
    value, gradient, metrics = evaluated(loss, columns, mask)
    up = 1 / (1 + math.exp(-1.5))
    assert value == pytest.approx(((1 - up) + 3 * up) / 2)
    assert gradient[1].item() == pytest.approx(-3 * gradient[0].item())
    assert metrics == pytest.approx({"implicit_reward": 2.0, "kl_baseline": 0.5})


def test_kto_reads_the_column_it_is_told_to() -> None:
    columns, mask = one_pair(2.0, 2.0)
    at_two = {**columns, "z0": torch.full((2,), 2.0, dtype=F64), "kl_baseline": torch.zeros(2, dtype=F64)}
    assert evaluated(losses.kto(baseline="z0"), at_two, mask)[0] == pytest.approx(0.5)
    assert evaluated(losses.kto(baseline=None), at_two, mask)[0] == pytest.approx(0.5)  # 0.5 each way cancels
    only_good = {**at_two, "chosen": torch.tensor([True, True])}
    assert evaluated(losses.kto(1.0, baseline=None), only_good, mask)[0] == pytest.approx(1 / (1 + math.exp(2.0)))


def test_reference_point_of_kto() -> None:
    policy, reference = (
        fr.Ragged.of([[-1.0, -1.0], [-2.0], [-9.0], []]),
        fr.Ragged.of([[-2.0, -3.0], [-1.0], [0.0], []]),
    )
    everything = fr.Ragged.of([[1, 1], [1], [0], []], dtype=bool)
    found = advantages.kto_baseline(policy, reference, everything)
    np.testing.assert_allclose(found, np.full(4, (3.0 - 1.0) / 2))  # the masked row and the empty one are left out
    assert (advantages.kto_baseline(reference, policy, everything) == 0).all()  # never below 0
    unknown = fr.Ragged.of([[np.nan, -1.0], [-2.0], [-9.0], []])
    assert (advantages.kto_baseline(unknown, reference, everything) == 0).all()
    assert len(advantages.kto_baseline(fr.Ragged.of([], dtype=float), fr.Ragged.of([], dtype=float))) == 0


def test_bco_shifts_where_good_and_bad_part() -> None:
    columns, mask = one_pair(3.0, 3.0)
    columns["shift"] = torch.full((2,), 3.0, dtype=F64)
    value, gradient, _ = evaluated(losses.bco(1.0, shift="shift"), columns, mask)
    assert value == pytest.approx(math.log(2))
    assert gradient[0].item() == -gradient[1].item() < 0


def test_orpo_at_certainty_is_finite_and_still_pulls() -> None:
    columns, mask = one_pair(0.0, 0.0, torch.float32)
    columns["logprobs"] = torch.tensor([[-3.0], [0.0]])  # the rejected response has probability 1
    value, gradient, _ = evaluated(losses.orpo(), columns, mask)
    assert math.isfinite(value) and gradient[0].item() < 0 < gradient[1].item()


def test_margin_of_a_pair_from_a_column() -> None:
    scores = torch.tensor([2.0, 1.0, 0.5, 1.5], dtype=F64, requires_grad=True)
    chosen, pair_id = torch.tensor([True, False, False, True]), ["a", "a", "b", "b"]
    margins = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=F64)
    columns = {"scores": scores, "chosen": chosen, "pair_id": pair_id, "lead": margins}
    mask = torch.ones(4, 1)
    value, _ = fr.apply_loss(losses.bradley_terry(margin_by="lead"), columns, mask)
    assert value.item() == pytest.approx(math.log(2))
    both, _ = fr.apply_loss(losses.bradley_terry(margin=1.0), columns, mask)
    assert both.item() == pytest.approx(math.log(2))
    with pytest.raises(OperatorError, match="margins from the column 'lead'"):
        fr.apply_loss(losses.bradley_terry(margin_by="lead"), {k: v for k, v in columns.items() if k != "lead"}, mask)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_reward_model_loss_is_finite_however_far_apart(size: float) -> None:
    scores = torch.tensor([size, -size], requires_grad=True)
    columns = {"scores": scores, "chosen": torch.tensor([True, False]), "pair_id": ["p", "p"]}
    value, _ = fr.apply_loss(losses.bradley_terry(center=0.01), columns, torch.ones(2, 1))
    (gradient,) = torch.autograd.grad(value, scores)
    assert value.item() == pytest.approx(max(-2 * size, 0.0)) and gradient.isfinite().all()


def test_a_score_whose_row_does_not_train_decides_nothing() -> None:
    columns = {"chosen": torch.tensor([True, False, True, False]), "pair_id": ["a", "a", "b", "b"]}
    mask = torch.tensor([[0.0], [1.0], [1.0], [1.0]])
    found = []
    for unseen in (3.0, math.nan):
        scores = torch.tensor([unseen, 2.0, 1.0, 1.0], dtype=F64, requires_grad=True)
        value, _ = fr.apply_loss(losses.bradley_terry(center=0.1), {"scores": scores, **columns}, mask)
        (gradient,) = torch.autograd.grad(value, scores)
        assert (gradient[:2] == 0).all() and (gradient[2:] != 0).all()
        found.append(value.item())
    assert found == pytest.approx([2 * (math.log(2) + 0.1 * 4) / 3] * 2)  # of three rows that train, two have a pair


def test_centring_pulls_the_mean_of_scores_to_0_and_leaves_their_difference() -> None:
    scores = torch.tensor([5.0, 4.0], dtype=F64, requires_grad=True)
    columns = {"scores": scores, "chosen": torch.tensor([True, False]), "pair_id": ["p", "p"]}
    plain, _ = fr.apply_loss(losses.bradley_terry(), columns, torch.ones(2, 1))
    centred, _ = fr.apply_loss(losses.bradley_terry(center=0.1), columns, torch.ones(2, 1))
    (gradient,) = torch.autograd.grad(centred - plain, scores)
    assert gradient.tolist() == pytest.approx([1.8, 1.8])


def test_plain_functions_take_tensors() -> None:
    """Without a graph: the loss of each row, the pair's at both."""
    segments = Segments.of(torch.tensor([0, 1]), 2)
    live = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = losses.ipo(live, torch.zeros(2), torch.tensor([True, False]), ["p", "p"], segments, beta=0.5)
    assert loss.tolist() == [0.0, 0.0] and metrics["preference_margin"].tolist() == [0.5, 0.5]
    with pytest.raises(DataError, match="1 of 1 pairs"):
        losses.simpo(live[:1], torch.tensor([True]), ["p"], Segments.of(torch.tensor([0]), 1))
    with pytest.raises(ConfigError, match="simpo needs beta > 0"):
        losses.simpo(live, torch.tensor([True, False]), ["p", "p"], segments, beta=-1.0)


def test_an_empty_batch_is_nothing() -> None:
    columns = {name: torch.zeros(0, 3) for name in ("logprobs", "ref_logprobs")}
    columns["logprobs"].requires_grad_()
    rows = {**columns, "chosen": torch.zeros(0, dtype=torch.bool), "pair_id": []}
    for name, loss in PAIRED.items():
        assert fr.apply_loss(loss, rows, torch.zeros(0, 3))[0].item() == 0, name


def test_flows_of_the_family_have_no_problem() -> None:
    @fr.flow
    def mixed(pairs, policy, ref):  # type: ignore[no-untyped-def]
        pairs = fr.logprobs(ref, pairs, out="ref_logprobs")
        return fr.update(policy, pairs, loss=0.8 * losses.dpo() + 0.4 * losses.bco() + losses.chosen_nll())

    @fr.flow
    def kto(examples, mismatched, policy, ref):  # type: ignore[no-untyped-def]
        other = fr.logprobs(policy, fr.logprobs(ref, mismatched, out="ref_logprobs"), out="old_logprobs")
        rows = fr.logprobs(ref, examples, out="ref_logprobs")
        rows = fr.join(rows, advantages.kto_baseline(other).select("kl_baseline"), on="prompt_id")
        return fr.update(policy, rows, loss=losses.kto())

    @fr.flow
    def without_reference(pairs, policy):  # type: ignore[no-untyped-def]
        return fr.update(policy, pairs, loss=losses.chosen_nll() + losses.orpo())

    for flow in (mixed, kto, without_reference):
        assert flow.check() == (), flow


def test_pairs_may_be_numbered_by_a_tensor() -> None:
    columns, mask = batch(2)
    by_text = fr.apply_loss(losses.dpo(), columns, mask)[0]
    known = {pair: number for number, pair in enumerate(dict.fromkeys(columns["pair_id"]))}  # type: ignore[call-overload]
    numbers = torch.tensor([known[pair] for pair in columns["pair_id"]])  # type: ignore[attr-defined]
    assert fr.apply_loss(losses.dpo(), columns | {"pair_id": numbers}, mask)[0] == by_text
