"""Work on rows: what each node reads, who made it, how many bytes it is."""

import pytest

import flowrl as fr
from examples.flows.dapo import dapo
from examples.flows.debate import debate
from examples.flows.grpo import grpo
from examples.flows.ppo import ppo
from flowrl.graph.nodes import Graph
from flowrl.graph.passes import optimise
from flowrl.planner.rows import RowConstants, RowWork, column_bytes, row_work
from flowrl.planner.workload import Lengths, Workload
from flowrl.schema.types import PROMPT, SAMPLE, TOKEN, TURN
from flowrl_operators import advantages, filters, losses, rewards

WORK = Workload(32, Lengths.fixed(512), Lengths.fixed(1024), group_size=8)


def work_of(flow, workload=WORK, constants=None) -> dict[str, RowWork]:
    graph, _ = optimise(flow if isinstance(flow, Graph) else flow.graph())
    return {one.name: one for one in row_work(graph, workload, constants)}


def read(work: RowWork) -> dict[str, tuple[str, ...]]:
    return {column.name: column.makers for column in work.reads}


def test_the_worked_number():
    """256 rows of 1,024 tokens, ids as i32, four f32 columns and a mask of one byte: 5.5 MB."""
    kinds = [TOKEN.i32, *[TOKEN.f32] * 4, TOKEN.bool]
    assert sum(column_bytes(kind, "x", 256, WORK) for kind in kinds) == 256 * 1024 * 21
    assert 256 * 1024 * 21 == pytest.approx(5.5e6, rel=2e-3)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (SAMPLE.f32, "reward", 256 * 4),
        (PROMPT.i32["*"], "prompt_ids", 32 * 512 * 4),  # once for all responses of a prompt
        (TOKEN.i32[64], "teacher_ids", 256 * 1024 * 64 * 4),
        (TURN.f32, "step_value", 256 * 4 * 4),
        (SAMPLE.str, "response", 256 * 1024 * 4),
        (PROMPT.str, "prompt", 32 * 512 * 4),
        (SAMPLE.str, "sample_id", 256 * 24),
    ],
)
def test_bytes_by_granularity(kind, name, expected):
    assert column_bytes(kind, name, 256, WORK) == expected


def test_what_an_algorithm_reads():
    work = work_of(grpo)
    assert list(work) == ["rollout", "math", "group_norm", "ref_logprobs", "update"]
    assert read(work["math"]) == {"answer": (), "response": ("rollout",)}
    assert read(work["group_norm"]) == {"loss_mask": ("rollout",), "prompt_id": (), "reward": ("math",)}
    assert set(read(work["ref_logprobs"])) == {"prompt_ids", "response_ids", "temperature"}
    assert work["update"].after == ("group_norm", "ref_logprobs", "rollout")
    assert "response" not in read(work["update"]), "a column that only the reward read goes no further"
    assert work["math"].after == ("rollout",) and work["math"].seconds == 256 * RowConstants().each_row_s


def test_pruned_columns_are_not_read():
    work = work_of(grpo(beta=0.0))
    assert "ref_logprobs" not in work and "ref_logprobs" not in read(work["update"])


def test_epochs_read_the_same_rows_again():
    work = work_of(ppo)
    bytes_of = {column.name: column.num_bytes for column in work["update"].reads}
    assert work["update"].rows == 2 * 256
    assert bytes_of["advantages"] == 256 * 1024 * 4


def test_a_refill_samples_all_its_rounds():
    work = work_of(dapo, Workload(32, Lengths.fixed(512), Lengths.fixed(1024), group_size=8, rounds=2.0))
    assert work["refill.math"].rows == 2 * work["group_norm"].rows
    assert work["refill"].after == ("refill.overlong", "refill.rollout")
    assert read(work["group_norm"]) == {"loss_mask": ("refill",), "prompt_id": ("refill",), "reward": ("refill",)}


def test_two_rollouts_that_are_listed_together():
    work = work_of(debate)
    assert read(work["update"])["loss_mask"] == ("rollout", "rollout_2")
    assert work["batch_norm"].is_whole and not work["exact"].is_whole


def test_a_filter_decides_which_rows_there_are():
    @fr.flow
    def filtered(prompts, policy, ref):
        rows = rewards.math(fr.rollout(policy, prompts, n=8))
        rows = filters.group_has_signal(rows)
        rows = fr.logprobs(ref, advantages.group_norm(rows), out="ref_logprobs")
        return fr.update(policy, rows, loss=losses.ppo_clip(0.2) + losses.kl("k3"))

    work = work_of(filtered)
    assert "group_has_signal" in work["ref_logprobs"].after
    assert "group_has_signal" in work["update"].after


def test_numbers_are_those_asked_for():
    slow = RowConstants(each_row_s=1.0, batch_row_s=0.5)
    work = work_of(grpo, constants=slow)
    assert work["math"].seconds == 256 and work["group_norm"].seconds == 128
    assert [one.seconds for one in work.values() if one.is_call] == [0, 0, 0]
