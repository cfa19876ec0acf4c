"""Prints the page: python -m tests.golden.disagreements > docs/explanation/where-systems-disagree.md"""

from __future__ import annotations

import sys

from tests.golden.disagreements import losses, responses, rewards, tokens
from tests.golden.disagreements.index import by_system, contents
from tests.golden.disagreements.tables import Section, written

CHAPTERS: dict[str, tuple[Section, ...]] = {
    "Advantages": (
        responses.DEVIATION, responses.ALONE, responses.MASKED_SIBLING, responses.INCOMPLETE,
        responses.LEAVE_ONE_OUT, responses.MAXRL, responses.GPG, responses.PARTS, tokens.RETURNS, tokens.GAE, tokens.WHITENING,
    ),
    "Which prompts go on": (responses.DYNAMIC, responses.ODD_ONE),
    "Averages": (losses.AVERAGES, losses.MICRO_BATCHES),
    "Policy losses": (losses.EXTREME, losses.DUAL, losses.GSPO, losses.CISPO, losses.GMPO,
                      losses.TOO_FAR, losses.IMPORTANCE, losses.REJECTED),
    "KL and entropy": (losses.KL_FAR, losses.KL_NEAR, losses.ENTROPY),
    "Preferences": (rewards.SMOOTHING, rewards.IPO),
    "Rewards": (rewards.OVERLONG, rewards.COSINE, rewards.GRADERS, rewards.GSM8K),
}  # fmt: skip

INTRODUCTION = """\
# Where systems disagree

Two systems say GRPO, or PPO, or KL, and compute different numbers. Mostly both are right: papers leave such things open, and each
choice has a reason. But who moves a recipe from one to the other moves its choices too, or a learning rate no longer fits and
nobody knows why. This page puts the same small inputs before each system, and says what each answers, what FlowRL answers, and
which call of ours answers the same as they do.

**Coming from another system?** The [last chapter](#by-system) has a table for each: its conventions, and our calls that do the
same.

**How to read it.** The first column names conventions: `verl.grpo_std` is how verl computes GRPO's advantage with a std. Each is
pinned by a file of vectors in `tests/golden/data`, made by running that system's own code. Systems that agree share a line.
The last line is what FlowRL does when nothing is said. Calls are written as for arrays, with the columns left out: in a flow
`group_norm(unbiased=True)` is `advantages.group_norm(rows, unbiased=True)`.

**Where the numbers are from.** *Recorded*: they stand in the vectors, for the input that is named. *Through the mapping*: each
convention is mapped to our operators with options, tests hold the mapping to all its vectors, values and gradients, and here it
answers the input of this page. † marks inputs that the vectors of these systems do not reach; there the answer follows from the
rule that their code states.

**What is checked.** This page is printed by `python -m tests.golden.disagreements`, which evaluates the calls in the last
column: one that gives another answer than its line shows is an error, and a test holds the page to what is printed.

**Versions.** verl 0.9.1, TRL 1.16.0, OpenRLHF 0.11.2, AReaL 1.0.4, ms-swift 4.6.0, math-verify 0.9.0; NeMo-RL, SkyRL, slime, ROLL
and prime-rl as of August 2026. All of them move; a line may be out of date when you read it. Numbers have four digits.
"""


def page() -> str:
    """The page. Errors: AssertionError when a line of it is not true."""
    parts = [INTRODUCTION, contents(CHAPTERS)]
    for chapter, sections in CHAPTERS.items():
        parts.append(f"## {chapter}\n")
        parts.extend(written(section) for section in sections)
    return "\n".join([*parts, by_system(CHAPTERS)])


if __name__ == "__main__":
    sys.stdout.write(page())
