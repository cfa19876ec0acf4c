"""Finding an operator or a loss: the list, `--search`, short names, and names of algorithms that are no names here."""

from pathlib import Path

import pytest

from flowrl.cli.lookup import cut

from .conftest import Cli

SPOKEN = {
    "IcePop": "losses.masked_importance",
    "TIS": "losses.truncated_importance",
    "MIS": "losses.masked_importance",
    "Dr. GRPO": "advantages.group_norm",
    "dr_grpo": "losses.ppo_clip",
    "GPG": "advantages.gpg",
    "gpg": "losses.reinforce",
    "clip-higher": "losses.ppo_clip",
    "dual clip": "losses.ppo_clip",
    "leave-one-out": "advantages.rloo",
    "leave one out": "advantages.group_norm",
    "JSD": "losses.jsd",
    "GKD": "losses.jsd",
    "MiniLLM": "losses.reverse_kl",
    "KPop": "masks.drift",
    "OPSM": "losses.off_policy_mask",
    "M2PO": "masks.second_moment",
    "DAPO": "rewards.overlong",
    "RAFT": "filters.top",
    "best-of-n": "filters.top",
    "rejection sampling": "filters.top",
    "REINFORCE++-baseline": "advantages.reinforce_pp_baseline",
    "LUSPO": "losses.gspo",
    "BNPO": "losses.ppo_clip",
    "VAPO": "advantages.gae",
    "Kimi": "losses.dro",
    "multiple choice": "rewards.choice",
    "exact match": "rewards.short_answer",
    "code execution": "rewards.code",
    "LLM judge": "rewards.judge",
    "Karmarkar": "samplers.part_by_length",
    "token budget": "samplers.batch_by_tokens",
    "batch-level": "advantages.batch_norm",
    "pairwise": "losses.bradley_terry",
    "online DPO": "filters.best_and_worst",
    "pass@k": "advantages.pass_at_k",
}
"""What people call a thing, and one of the places where it is."""


@pytest.mark.parametrize("said", SPOKEN)
def test_what_people_call_a_thing_is_found(cli: Cli, said: str) -> None:
    result = cli("ops", "list", "--search", said)
    assert result.code == 0
    assert f"core.{SPOKEN[said]}" in result.out.splitlines()


def test_a_search_says_where_the_word_stands(cli: Cli) -> None:
    lines = cli("ops", "list", "--search", "icepop").out.splitlines()
    at = lines.index("core.losses.masked_importance")
    assert lines[at + 1].startswith("    A weight to multiply another term with: ")
    assert "IcePop" in lines[at + 2]
    named = cli("ops", "list", "--search", "rloo").out.splitlines()
    at = named.index("core.advantages.rloo")
    assert not named[at + 2].startswith("    ")  # the name says it already
    assert max(map(len, lines + named)) <= 120


def test_a_search_looks_at_options_and_columns_and_wants_every_word(cli: Cli) -> None:
    assert "    teacher_ids" not in (out := cli("ops", "list", "--search", "teacher_ids").out)
    assert "core.losses.forward_kl\n" in out and "    reads teacher_ids\n" in out
    assert "    row_advantage: " in cli("ops", "list", "--search", "row_advantage").out
    both = cli("ops", "list", "--search", "icepop", "normalise").out
    assert both.startswith("core.importance.importance_weights\n") and "core.losses" not in both
    assert cli("ops", "list", "--search", "normalis").code == 0  # a word may go on where nothing has it whole


def test_a_search_that_finds_nothing_says_so(cli: Cli) -> None:
    result = cli("ops", "list", "--pack", "core", "--search", "icepopp")
    assert result.code == 1
    assert result.out == "no operator and no loss of core mentions 'icepopp'; did you mean 'IcePop'?\n"
    assert cli("ops", "list", "--search", "icepop", "xyzzy").out.endswith("mentions 'icepop' and 'xyzzy'\n")
    refused = cli("ops", "list", "--pack", "core", "--json", "--search", "icepop")
    assert refused.code == 2 and "give one of them" in refused.err


def test_the_list_fits_a_screen_and_says_what_each_is(cli: Cli) -> None:
    lines = cli("ops", "list").out.splitlines()
    assert max(map(len, lines)) <= 120
    (line,) = [line for line in lines if line.startswith("  advantages.group_norm ")]
    assert line.split()[1:5] == ["advantage", "GRPO:", "A_i", "="]
    assert line.endswith("...")
    assert any(line.startswith("  losses.reinforce ") and line.endswith("  REINFORCE: -A log pi.") for line in lines)


def test_names_too_long_for_a_screen_keep_what_they_say(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "centred_" * 14 + "x"
    text = f'import flowrl as fr\n\n\n@fr.reward\ndef {name}(response):\n    """{"Words " * 20}"""\n    return 1.0\n'
    (folder / "long_names.py").write_text(text)
    info = folder / "flowrl_long-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flowrl-long\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowrl.operators]\nlong = long_names\n")
    monkeypatch.syspath_prepend(str(folder))
    (line,) = [line for line in cli("ops", "list", "--pack", "long").out.splitlines() if name in line]
    assert line.endswith("Words Words Words Words Words Words...")


@pytest.mark.parametrize(("short", "whole"), [("rloo", "core.rloo"), ("losses.dpo", "core.losses.dpo")])
def test_a_name_that_no_other_has_needs_no_pack(cli: Cli, short: str, whole: str) -> None:
    out = cli("ops", "show", short).out
    assert out.splitlines()[1:] == cli("ops", "show", whole).out.splitlines()[1:] != []
    assert cli("ops", "compat", short, whole).out == f"no change: {short} to {whole}\n"


def test_a_short_name_can_be_tried(cli: Cli) -> None:
    result = cli("ops", "test", "rloo")
    assert (result.code, result.out.splitlines()[0]) == (0, "rloo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "core.icepop",
            "pack 'core' has no 'icepop'; it is mentioned by core.importance.importance_weights, core.losses.",
        ),
        ("icepop", "no pack has an operator or a loss 'icepop'; it is mentioned by core.importance.importance_weights"),
        ("icepop", ": flowrl ops list --search icepop"),
        ("rlo", "no pack 'rlo' is installed, and no pack has an operator or a loss 'rlo'; did you mean 'rloo'"),
        ("dapo", "and others: flowrl ops list --search dapo"),
        ("adapters.reward", "no pack 'adapters' is installed"),
        ("reward", "'reward' may be core.adapters.reasoning_gym.reward or core.adapters."),
        ("core.reward", "'core.reward' may be core.adapters.reasoning_gym.reward or core.adapters."),
    ],
)
def test_what_is_no_name(cli: Cli, name: str, message: str) -> None:
    result = cli("ops", "show", name)
    assert result.code == 2
    assert message in result.err


def test_a_cut_ends_at_a_word() -> None:
    assert cut("one two three", 13) == "one two three"
    assert cut("one two three", 12) == "one two..."
    assert cut("one two, three four", 14) == "one two..."
    assert cut("x" * 20, 10) == "x" * 7 + "..."
