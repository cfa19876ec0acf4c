"""The ranks of a job run one thing: what each was given is compared before models are opened, and what each draws at every step.

    rank 0   seed 0, plan 7b20dcaaeca3, batch 32         rank 1   seed 1, ...     ConfigError, on all ranks, before step 0
    rank 0   step 3: prompts 5f0c...                     rank 1   prompts 91ab... DataError, when the step has ended

Without it, ranks that were started with other arguments, or whose data come in another order, would go on with a mixture of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, DataError
from flowrl.model import Model
from flowrl.runtime.ranks import packed
from flowrl.runtime.ranks.exchange import Exchange
from flowrl.store.rows import RowBatch

Facts = Mapping[str, str]
"""What should be equal on all ranks, by what it is called."""


def facts_of(models: Mapping[str, Model], **given: Any) -> dict[str, str]:
    """What a rank was given. Of models: what decides numbers, but the weights of one that was built in memory."""
    found = {name: str(value) for name, value in given.items()}
    for name, model in models.items():
        source = str(model.source) if isinstance(model.source, str | Path) else type(model.source).__name__
        found[f"model '{name}'"] = f"{source}, {model.head}, {model.precision}, {model.sampler}, {model.optimizer}"
    return found


def compare_facts(exchange: Exchange, facts: Facts) -> None:
    """Errors: ConfigError, on every rank, when one was given something else."""
    world = exchange.board.world
    if world > 1:
        told = [exchange.tell(f"-1/given/{rank}", rank, facts, "what it was given") for rank in range(world)]
        if different := differences(told):
            raise ConfigError(
                f"the ranks of a job need the same arguments; found {'; '.join(different)}: start all of them with the same ones"
            )


def compare_drawn(step: int, told: Sequence[Facts]) -> None:
    """Errors: DataError when a rank has drawn other rows in a step than the others.

    Args:
        told: digests of what each rank drew, by data set; [] where there is nothing to compare.
    """
    if different := differences(told):
        raise DataError(
            f"in step {step} ranks drew different rows, and every rank draws all of them; digests: {'; '.join(different)}. Give "
            "every rank the same data in the same order: one file, and what is drawn or shuffled by a seed of its own"
        )


def differences(told: Sequence[Facts]) -> list[str]:
    """What is not equal, each with its values and the ranks that have them: the value of most ranks first."""
    found = []
    for name in dict.fromkeys(name for facts in told for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(told):
            ranks.setdefault(facts.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            each = sorted(ranks.items(), key=lambda item: -len(item[1]))
            found.append(f"{name}: {', '.join(f'{value} on {_named(of)}' for value, of in each)}")
    return found


def digest_of(rows: RowBatch) -> str:
    """Of all columns of rows."""
    found = hashlib.blake2b(digest_size=6)
    for name, array in sorted(packed.pack(rows).items()):
        found.update(f"{name} {array.dtype.str} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
