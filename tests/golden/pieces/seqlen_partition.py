"""Parts of equal work and batches under a token budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.errors import ConfigError
from flowrl_operators import samplers
from tests.golden.runner import Contract
from tests.golden.vectors import Case


def _lengths(case: Case) -> Any:
    return case.array("seqlens").astype(int)


def refused(call: Callable[[], Any]) -> Contract:
    try:
        call()
    except ConfigError:
        return Contract("fewer rows than parts is refused: no part may be empty", holds=True)
    return Contract("fewer rows than parts is refused: no part may be empty", holds=False)


def _parts(share: Callable[..., Any], **options: Any) -> Callable[[Case], Any]:
    def answer(case: Case) -> Any:
        lengths, equal = _lengths(case), case.params.get("equal_size", False)
        count = case.params["k_partitions"]
        if len(lengths) < count:
            return refused(lambda: share(lengths, count, equal_size=equal, **options))
        parts = share(lengths, count, equal_size=equal, **options)
        sums, sizes = sorted(samplers.sums_of(lengths, parts).tolist()), sorted(map(len, parts))
        if "raises" in case.outputs:
            promise = "parts that cannot have equally many rows differ by one"
            return Contract(promise, equal and sizes[-1] - sizes[0] <= 1 and sum(sizes) == len(lengths))
        wanted = case.outputs
        if sums[-1] < wanted.get("max_sum", sums[-1]):
            return Contract("a greatest sum that is less", holds=True)
        found = {
            "sorted_sums": sums,
            "max_sum": sums[-1],
            "min_sum": sums[0],
            "spread": sums[-1] - sums[0],
            "sizes": sizes,
        }
        return {name: value for name, value in found.items() if name in wanted}

    return answer


def _count(case: Case) -> dict[str, Any]:
    across = case.params.get("ring_attn_size", 1) * case.params.get("ds_tensor_parallel_size", 1)
    budget = case.params["max_tokens_per_gpu"] * across
    return {"count": samplers.num_token_batches(_lengths(case), budget, fit="first_fit")}


PATTERNS = [
    (r"\w+\.(get_seqlen_balanced_partitions|karmarkar_karp)", lambda case, _: _parts(samplers.balanced_parts)(case)),
    (r"\w+\.greedy_partition", lambda case, _: _parts(samplers.greedy_parts, order="given")(case)),
    (r"\w+\.(min_num_micro_batches|get_minimum_num_micro_batch_size)", lambda case, _: _count(case)),
]
