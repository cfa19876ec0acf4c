"""DPO and its family, KTO, CPO, SimPO, ORPO.

All of them are means over pairs, or over rows, so that `average` of `fr.apply_loss` plays no part but in SFT.
"""

from __future__ import annotations

from collections.abc import Callable
from re import Match
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flowrl as fr
from flowrl_operators import advantages, losses
from tests.golden.pairs import columns_of_pairs, loss_and_gradient, of_each_pair, stacked
from tests.golden.runner import Contract
from tests.golden.vectors import Case, ragged

DIVERGENCES = {
    "reverse_kl": "reverse_kl",
    "forward_kl": "forward_kl",
    "js_divergence": "js",
    "alpha_divergence": "alpha",
}
KINDS = {"nca_pair": "nca", "exo_pair": "exo", "sppo_hard": "sppo", "sigmoid_norm": "sigmoid"}
PLAIN = {"sigmoid", "sigmoid_norm", "hinge", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "discopop"}
"""Losses in which TRL does not look at label_smoothing."""
BY_RATIO = {"nca_pair", "sppo_hard", "apo_zero", "apo_down"}
"""Losses in which TRL does not look at the divergence."""


def _matrices(case: Case) -> tuple[dict[str, Any], Tensor]:
    """Log-probabilities per token, and their mask [rows, tokens]."""
    columns = {
        "logprobs": torch.tensor(case.array("per_token_logps")),
        "ref_logprobs": torch.tensor(case.array("ref_per_token_logps")),
    }
    return columns, torch.tensor(case.array("completion_mask"))


def _empty_row(mask: Tensor, loss: fr.Loss, columns: dict[str, Any]) -> Contract | None:
    """What stands for a case with an empty response: a row without a trained token weighs nothing, so only the other row of
    its pair counts; elsewhere the pair counts whole."""
    is_empty = (mask != 0).sum(1) == 0
    if not is_empty.any():
        return None
    value, gradient, _ = loss_and_gradient(loss, columns, mask, "logprobs")
    is_still = np.isfinite(value) and not gradient[mask.numpy() == 0].any()
    return Contract("a row without a trained token weighs nothing", bool(is_still))


def trl_dpo(case: Case, found: Match[str]) -> Any:
    """Rows: all chosen, then all rejected."""
    columns, mask = _matrices(case)
    columns |= columns_of_pairs(len(mask))
    if (contract := _empty_row(mask, losses.dpo(case.params["beta"]), columns)) is not None:
        return contract
    kinds = case.params.get("loss_type", "sigmoid")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    weights = case.params.get("loss_weights") or [1.0] * len(kinds)
    # the likelihood is a mean over the chosen responses' tokens, whatever the others: a loss on those rows alone
    value, gradient, metrics = 0.0, np.zeros(mask.shape), {}
    terms = [weight * _trl_term(case, kind) for kind, weight in zip(kinds, weights, strict=True) if kind != "sft"]
    if terms:
        value, gradient, metrics = loss_and_gradient(sum(terms), columns, mask, "logprobs")
    for kind, weight in zip(kinds, weights, strict=True):
        if kind == "sft":
            half = len(mask) // 2
            part, slope, _ = loss_and_gradient(
                weight * losses.sft(), {"logprobs": columns["logprobs"][:half]}, mask[:half], "logprobs"
            )
            value, gradient[:half] = value + part, gradient[:half] + slope
    answer = {"loss": value, "grad_per_token_logps": gradient}
    if set(kinds) & {"ipo", "sigmoid_norm", "sft"} or "preference_margin" not in metrics:
        metrics = loss_and_gradient(losses.dpo(case.params["beta"]), columns, mask, "logprobs")[
            2
        ]  # they log sums here too
    names = {"rewards_chosen": "chosen_reward", "rewards_rejected": "rejected_reward", "margins": "preference_margin"}
    return answer | {theirs: metrics[ours] for theirs, ours in names.items() if theirs in case.outputs}


def _trl_term(case: Case, kind: str) -> fr.Loss:
    beta, smoothing = case.params["beta"], case.params.get("label_smoothing", 0.0)
    if kind == "bco_pair":
        return 2.0 * losses.bco(beta=beta)  # both rows of a pair are added up there
    if kind.startswith("aot"):
        return losses.aot(beta=beta, label_smoothing=smoothing, paired=kind == "aot")
    return losses.dpo(
        beta=beta,
        kind=KINDS.get(kind, kind),
        label_smoothing=0.0 if kind in PLAIN or kind == "ipo" else smoothing,
        reduce="mean" if kind in ("ipo", "sigmoid_norm") else "sum",
        divergence="reverse_kl"
        if kind in BY_RATIO
        else DIVERGENCES[case.params.get("f_divergence_type", "reverse_kl")],
        alpha=case.params.get("f_alpha_divergence_coef", 0.5),
        tau=case.params.get("discopop_tau", 0.05),
    )


def nemo_dpo(case: Case) -> Any:
    """Rows interleaved; sums over tokens unless averaged."""
    columns, mask = _matrices(case)
    kept = torch.tensor(case.array("sample_mask")) != 0  # pairs that are not counted are not there
    columns, mask = {name: column[kept] for name, column in columns.items()}, mask[kept]
    columns |= columns_of_pairs(len(mask), interleaved=True)
    params = case.params
    if (contract := _empty_row(mask, losses.dpo(params["reference_policy_kl_penalty"]), columns)) is not None:
        return contract
    by = {True: "mean", False: "sum"}
    preference = losses.dpo(
        params["reference_policy_kl_penalty"], reduce=by[params.get("preference_average_log_probs", False)]
    )
    likelihood = losses.chosen_nll(reduce=by[params.get("sft_average_log_probs", False)])
    weights = params.get("preference_loss_weight", 1.0), params.get("sft_loss_weight", 0.0)
    value, gradient, metrics = loss_and_gradient(
        weights[0] * preference + weights[1] * likelihood, columns, mask, "logprobs"
    )
    whole = np.zeros((len(kept), mask.shape[1]))
    whole[kept.numpy()] = gradient
    return {
        "loss": value,
        "grad_per_token_logps": whole,
        "preference_loss": loss_and_gradient(preference, columns, mask, "logprobs")[0],
        "sft_loss": loss_and_gradient(likelihood, columns, mask, "logprobs")[0] if weights[1] else 0.0,
        "accuracy": metrics["preference_accuracy"],
    }


def openrlhf_dpo(case: Case) -> dict[str, Any]:
    """A number per response: a response of one token."""
    columns = {
        "logprobs": stacked(case, "policy_chosen_logps", "policy_rejected_logps"),
        "ref_logprobs": stacked(case, "reference_chosen_logps", "reference_rejected_logps"),
    }
    rows = len(columns["logprobs"])
    beta = case.params["beta"]
    loss = losses.ipo(beta) if case.params["ipo"] else losses.dpo(beta, label_smoothing=case.params["label_smoothing"])
    value, gradient, _ = loss_and_gradient(loss, columns | columns_of_pairs(rows), torch.ones(rows, 1), "logprobs")
    rewards = _rewards(losses.dpo(beta), columns, rows)
    return {
        "loss": value,
        "grad_chosen": gradient[: rows // 2, 0],
        "grad_rejected": gradient[rows // 2 :, 0],
        "chosen_rewards": rewards["chosen_reward"],
        "rejected_rewards": rewards["rejected_reward"],
    }


def areal_dpo(case: Case, found: Match[str]) -> dict[str, Any]:
    """A margin per pair: the rejected response's log-probability and the reference are 0."""
    margins = torch.tensor(case.array("logits"))[:, None]
    zeros = torch.zeros_like(margins)
    columns = {"logprobs": torch.cat([margins, zeros]), "ref_logprobs": torch.cat([zeros, zeros])}
    columns |= columns_of_pairs(2 * len(margins))
    loss = getattr(losses, {"sigmoid": "dpo", "ipo": "ipo"}[found["kind"]])(case.params["beta"])
    _, gradient, _ = loss_and_gradient(loss, columns, torch.ones(2 * len(margins), 1), "logprobs")
    return {
        "losses": of_each_pair(loss, columns),
        "grad_sum": gradient[: len(margins), 0] * len(margins),  # theirs is of the sum over pairs
    }


def trl_reference_free(make: Callable[[dict[str, Any]], fr.Loss]) -> Callable[[Case], dict[str, Any]]:
    """CPO and SimPO: a number per response, summed or averaged over its tokens already."""

    def answer(case: Case) -> dict[str, Any]:
        loss = make(case.params)
        columns = {"logprobs": stacked(case, "chosen_logps", "rejected_logps")}
        rows = len(columns["logprobs"])
        value, gradient, _ = loss_and_gradient(loss, columns | columns_of_pairs(rows), torch.ones(rows, 1), "logprobs")
        rewards = _rewards(loss, columns, rows)
        return {
            "losses": of_each_pair(loss, columns | columns_of_pairs(rows)),
            "loss": value,
            "grad_chosen": gradient[: rows // 2, 0],
            "grad_rejected": gradient[rows // 2 :, 0],
            "chosen_rewards": rewards["chosen_reward"],
            "rejected_rewards": rewards["rejected_reward"],
        }

    return answer


def _rewards(loss: fr.Loss, columns: dict[str, Any], rows: int) -> dict[str, np.ndarray]:
    """Metrics of each pair by itself."""
    found = []
    for pair in range(rows // 2):
        at = torch.tensor([pair, pair + rows // 2])
        one = {name: column[at] for name, column in columns.items()} | columns_of_pairs(2)
        found.append(fr.apply_loss(loss, one, torch.ones(2, 1))[1])
    return {name: np.asarray([metrics[name] for metrics in found]) for name in (found[0] if found else {})}


def _cpo(params: dict[str, Any], kind: str) -> fr.Loss:
    smoothing = params["label_smoothing"] if kind == "sigmoid" else 0.0  # the others do not look at it
    reduce = "mean" if kind == "ipo" else "sum"
    return losses.cpo(
        params["beta"], label_smoothing=smoothing, kind=kind, reduce=reduce, alpha=params.get("alpha", 0.0)
    )


def _simpo(params: dict[str, Any]) -> fr.Loss:
    return losses.simpo(
        params["beta"], params["simpo_gamma"], label_smoothing=params["label_smoothing"], alpha=params.get("alpha", 0.0)
    )


def trl_orpo(case: Case) -> dict[str, Any]:
    columns = {"logprobs": stacked(case, "chosen_avg_logps", "rejected_avg_logps")}
    rows = len(columns["logprobs"])
    columns |= columns_of_pairs(rows)
    loss = losses.orpo(case.params["beta"])
    value, gradient, metrics = loss_and_gradient(loss, columns, torch.ones(rows, 1), "logprobs")
    return {
        "or_term": -of_each_pair(loss, columns),
        "loss_without_nll": value,
        "grad_chosen": gradient[: rows // 2, 0],
        "grad_rejected": gradient[rows // 2 :, 0],
        "log_odds": metrics["log_odds"],
        "log_odds_ratio": metrics["log_odds_ratio"],
    }


def trl_kto(case: Case, found: Match[str]) -> Any:
    columns, mask = _matrices(case)
    columns["chosen"] = torch.tensor(case.array("labels_desirable")) != 0
    baseline = None if found["zero"] else "kl_baseline"
    if baseline:
        level = advantages.kto_baseline(*(ragged(case.array(name)[:, None]) for name in ("KL_logps", "ref_KL_logps")))
        columns[baseline] = torch.tensor(level)
    loss = losses.kto(
        case.params["beta"],
        desirable_weight=case.params["desirable_weight"],
        undesirable_weight=case.params["undesirable_weight"],
        baseline=baseline,
    )
    if (contract := _empty_row(mask, loss, columns)) is not None:
        return contract
    value, gradient, metrics = loss_and_gradient(loss, columns, mask, "logprobs")
    return {"loss": value, "grad_per_token_logps": gradient, "kl": metrics["kl_baseline"]}


CONVENTIONS = {
    "nemo.dpo": nemo_dpo,
    "openrlhf.dpo_cdpo": openrlhf_dpo,
    "openrlhf.ipo": openrlhf_dpo,
    "trl.simpo": trl_reference_free(_simpo),
    "trl.alphapo_simpo": trl_reference_free(_simpo),
    "trl.orpo": trl_orpo,
}

PATTERNS = [
    (r"trl\.dpo_\w+", trl_dpo),
    (r"areal\.dpo_(?P<kind>sigmoid|ipo)", areal_dpo),
    (r"openrlhf\.(dpo|ipo)\w*", lambda case, found: openrlhf_dpo(case)),
    (
        r"trl\.(cpo|alphapo)_(?P<kind>sigmoid|hinge|ipo)",
        lambda case, found: trl_reference_free(lambda p: _cpo(p, found["kind"]))(case),
    ),
    (r"trl\.kto(?P<zero>_apo_zero_unpaired)?", trl_kto),
]
