"""Training: gradients that do not depend on how rows were split, and steps that can be trusted."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import flowrl as fr
from flowrl.engines import forward as forward_module
from flowrl.engines.protocol import SamplingOptions
from flowrl.engines.trainer_torch import learning_rate
from flowrl.errors import DataError, EngineError, OperatorError, SchemaError
from flowrl.model import AdamW
from flowrl.schema.ragged import Ragged


@fr.loss
def reinforce(logprobs, advantage: fr.SAMPLE.f32, segments):
    return -logprobs * segments.spread(advantage)


@fr.loss
def with_entropy(logprobs, entropy, weights: fr.TOKEN.f32):
    return weights * logprobs - 0.3 * entropy, {"entropy": entropy}


@fr.loss(per="sample")
def squared_sum(logprobs, segments):
    return segments.sum(logprobs) ** 2


@fr.loss(on_policy=False)
def stored(x: fr.TOKEN.f32, logprobs):
    return x + 0 * logprobs, {"x": x}


@fr.loss
def ratio_clip(
    logprobs,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    *,
    clip: float = 0.2,
):
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages), {
        "ratio": ratio,
        "clipped": (clipped != ratio).float(),
    }


def columns_of(rows, seed=0):
    generator = np.random.default_rng(seed)
    count = len(rows.response_ids.values)
    return {
        "advantage": generator.normal(size=len(rows)).astype(np.float32),
        "weights": Ragged.like(generator.normal(size=count).astype(np.float32), rows.response_ids),
    }


def random_mask(rows, seed=0, share=0.6):
    generator = np.random.default_rng(seed)
    return Ragged.like(generator.random(len(rows.response_ids.values)) < share, rows.response_ids).to_list()


# --- gradients --------------------------------------------------------------------------------------------------------


def reference_gradients(kit, module, rows, mask, columns, average, length):
    """Row by row with plain operations, after the formulas of `flowrl.graph.averages.AVERAGES`."""
    counts = [sum(m) for m in mask]
    busy = sum(c > 0 for c in counts)
    total = torch.zeros(())
    for i, count in enumerate(counts):
        if count == 0:
            continue
        prompt, response, temperature = rows.prompt_ids[i], rows.response_ids[i], float(rows.temperature[i])
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        logp = logits.log_softmax(-1)
        chosen = logp.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        m = torch.tensor(mask[i])
        token = -chosen * float(columns["advantage"][i]) + torch.tensor(columns["weights"][i]) * chosen - 0.3 * entropy
        divisor = {
            "token_mean": sum(counts), "sequence_mean": busy * count, "sequence_sum": busy, "constant": busy * (length or 0),
        }[average]  # fmt: skip
        total = total + token[m].sum() / divisor + 0.1 * chosen[m].sum() ** 2 / busy
    total.backward()
    found = {n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None}
    return total.item(), found


@pytest.mark.parametrize("average", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_gradients_do_not_depend_on_micro_batches(kit, family, average):
    rows = kit.random_rows(7, seed=1)
    mask = random_mask(rows, seed=2)
    mask[3] = [False] * len(mask[3])
    columns = columns_of(rows)
    length = 11 if average == "constant" else None
    loss = reinforce() + with_entropy() + 0.1 * squared_sum()
    expected_loss, expected = reference_gradients(kit, family(), rows, mask, columns, average, length)
    for budget in (1, 14, 29, 10_000):
        host = kit.open(family(), "update", micro_batch_tokens=budget)
        report = host.update(kit.job(rows, loss, mask, columns=columns, average=average, average_length=length))
        assert report.metrics["loss"].mean == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        assert report.tokens == sum(map(sum, mask))
        kit.assert_equal_gradients(kit.gradients(host), expected, f"budget {budget}")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 9), st.sampled_from(["token_mean", "sequence_mean"]))
def test_any_split_gives_the_same_step(kit, seed, budget, count, average):
    rows = kit.random_rows(count, seed=seed)
    mask = random_mask(rows, seed=seed)
    mask[0][0] = True
    columns = columns_of(rows, seed)
    loss = reinforce() + with_entropy()

    def run(budget):
        host = kit.open(kit.families["gpt2"](), "update", micro_batch_tokens=budget)
        report = host.update(kit.job(rows, loss, mask, columns=columns, average=average))
        return kit.gradients(host), report

    split, whole = run(budget), run(10_000)
    kit.assert_equal_gradients(split[0], whole[0])
    for name, stat in whole[1].metrics.items():
        assert split[1].metrics[name].mean == pytest.approx(stat.mean, abs=1e-5, rel=1e-5)
        assert split[1].metrics[name].count == stat.count


def test_the_mean_is_over_all_tokens_of_the_step(kit):
    # 5 tokens of 1 and 1 token of 10: 2.5, where a mean of means gives 5.5; the third row is masked
    rows = kit.rows([[3]] * 3, [[4] * 5, [4], [4, 4]])
    x = Ragged.of([[1.0] * 5, [10.0], [100.0] * 2], np.float32)
    mask = [[True] * 5, [True], [False] * 2]
    for budget in (1, 6, 12, 100):
        host = kit.open(kit.families["llama"](), "update", micro_batch_tokens=budget)
        report = host.update(kit.job(rows, stored(), mask, columns={"x": x}))
        assert report.metrics["loss"].mean == pytest.approx(2.5)
        assert (report.metrics["x"].total, report.metrics["x"].count) == (15.0, 6)


def test_each_minibatch_is_normalised_by_its_own_tokens(kit):
    # whatever was sampled for the other steps: each step's mean of a constant 1 is 1
    rows = kit.random_rows(32, seed=4)
    x = Ragged.like(np.ones(len(rows.response_ids.values), np.float32), rows.response_ids)
    host = kit.open(kit.families["llama"](), "update", micro_batch_tokens=40)
    for minibatches in (1, 4, 32):
        report = host.update(kit.job(rows, stored(), columns={"x": x}, minibatches=minibatches))
        assert report.steps == minibatches
        assert report.metrics["loss"].total == pytest.approx(minibatches, rel=1e-5)


def test_large_vocabularies_go_through_in_slices(kit, monkeypatch):
    rows, loss = kit.random_rows(6, seed=3), reinforce() + with_entropy()
    columns = columns_of(rows)

    def run():
        host = kit.open(kit.families["llama"](), "update", "logprobs", "top_logprobs")
        before, top = host.logprobs(rows).values, host.top_logprobs(rows, 3)[1].values
        host.update(kit.job(rows, loss, columns=columns))
        return before, top, kit.gradients(host)

    whole = run()
    monkeypatch.setattr(forward_module, "SLICE_ELEMENTS", 60)  # three tokens
    sliced = run()
    np.testing.assert_allclose(sliced[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(sliced[1], whole[1], atol=1e-5)
    kit.assert_equal_gradients(sliced[2], whole[2])


def test_capped_logits_are_noticed(kit):
    assert kit.open(kit.families["llama"](), "update").forward.split
    assert kit.open(kit.families["gpt2"](), "update").forward.split
    assert not kit.open(kit.families["gemma2"](), "update").forward.split


def test_checkpointed_layers_give_the_same_gradients(kit, family):
    rows = kit.random_rows(5, seed=3)
    columns = columns_of(rows)
    found, ran = [], []
    for on in (False, True):
        # GPT-2's config asks for dropout: it must stay off although checkpointing belongs to training mode
        host = kit.open(family(), "generate", "update", gradient_checkpointing=on)
        before = host.generate(kit.requests([[5, 6, 7]]), SamplingOptions())
        layers = [m for m in host.module.modules() if type(m).__name__.endswith(("DecoderLayer", "GPT2Block"))]
        calls = [0]
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        host.update(kit.job(rows, reinforce(), columns=columns))
        ran.append(calls[0])
        found.append(kit.gradients(host))
        assert len(before[0].ids) == len(before[0].logprobs)
        after = host.generate(kit.requests([[5, 6, 7]]), SamplingOptions())  # with its cache, as before
        again = kit.rows([[5, 6, 7]], [after[0].ids])
        np.testing.assert_allclose(after[0].logprobs, host.logprobs(again).values, atol=1e-5)
    kit.assert_equal_gradients(found[1], found[0])
    assert ran[1] == 2 * ran[0] > 0  # every layer ran once more, in the backward pass


def test_dropout_is_off_so_that_ratios_start_at_one(kit):
    module = kit.families["gpt2"]()  # its config asks for dropout of 0.1
    assert module.config.resid_pdrop == 0.1
    host = kit.open(module.train(), "generate", "update")
    requests = kit.requests([[5, 6], [7, 8, 9]], n=4)
    sampled = host.generate(requests, SamplingOptions())
    rows = kit.rows([r.prompt_ids for r in requests], [s.ids for s in sampled])
    columns = {
        "old_logprobs": Ragged.of([s.logprobs for s in sampled], np.float32),
        "advantage": np.ones(len(rows), np.float32),
    }
    report = host.update(kit.job(rows, ratio_clip(), columns=columns))
    assert report.metrics["ratio"].mean == pytest.approx(1, abs=1e-5)


def test_temperature_scales_logprobs_and_entropy_alike(kit):
    p = np.array([0.7, 0.2, 0.1])
    table = torch.from_numpy(np.log(p)).repeat(3, 1)
    host = kit.open(kit.bigram(table), "update", "logprobs", tokenizer=kit.letters(vocab_size=3, eos_ids=frozenset()))
    rows = kit.rows([[0]], [[1]], 0.5)
    assert host.logprobs(rows).values[0] == pytest.approx(-2.6027, abs=1e-4)
    scaled = p**2 / (p**2).sum()

    @fr.loss
    def report_all(logprobs, entropy, logits):
        every = torch.cat([logits.log_softmax(-1)[:, :1]], 1)[:, 0]
        return logprobs, {"logprob": logprobs, "entropy": entropy, "first": every}

    report = host.update(kit.job(rows, report_all()))
    assert report.metrics["logprob"].mean == pytest.approx(math.log(scaled[1]), abs=1e-5)
    assert report.metrics["entropy"].mean == pytest.approx(-(scaled * np.log(scaled)).sum(), abs=1e-5)
    assert report.metrics["first"].mean == pytest.approx(math.log(scaled[0]), abs=1e-5)


@pytest.mark.parametrize("stored_old", [True, False])
def test_the_second_minibatch_is_off_policy(kit, stored_old):
    host = kit.open(kit.families["llama"](), "update", "logprobs", optimizer=AdamW(lr=3e-2))
    rows = kit.random_rows(8, seed=5)
    columns = {"advantage": np.random.default_rng(0).normal(size=8).astype(np.float32)}
    if stored_old:
        columns["old_logprobs"] = host.logprobs(rows)
    report = host.update(kit.job(rows, ratio_clip(), columns=columns, minibatches=2))
    assert report.steps == 2
    assert report.metrics["ratio"].mean != pytest.approx(1, abs=1e-3)
    assert report.metrics["clipped"].total > 0
    first = kit.open(kit.families["llama"](), "update").update(kit.job(rows, ratio_clip(), columns=columns))
    assert first.metrics["ratio"].mean == pytest.approx(1, abs=1e-5)
    assert first.metrics["clipped"].total == 0


def test_live_logprobs_stand_in_without_gradient(kit):
    rows = kit.random_rows(5, seed=5)
    columns = {"advantage": columns_of(rows)["advantage"]}
    found = []
    for old in ({}, {"old_logprobs": kit.open(kit.families["llama"](), "logprobs").logprobs(rows)}):
        host = kit.open(kit.families["llama"](), "update")
        report = host.update(kit.job(rows, ratio_clip(), columns={**columns, **old}))
        assert report.metrics["grad_norm"].mean > 0.1  # a ratio to itself would have none
        found.append(kit.gradients(host))
    kit.assert_equal_gradients(*found)


# --- steps ------------------------------------------------------------------------------------------------------------


def flat(state):
    weights = {f"w {n}": a for n, a in state["weights"].items()}
    adam = {f"{n} {k}": np.asarray(v) for n, entry in state["optimizer"].items() for k, v in entry.items()}
    return {**weights, **adam, "steps": np.asarray(state["schedule"]["steps"])}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing(kit, precision, bad):
    options = AdamW(lr=1e-2, warmup_steps=10, weight_decay=0.1)
    host = kit.open(kit.families["llama"](), "update", precision=precision, optimizer=options, micro_batch_tokens=20)
    rows = kit.random_rows(6, seed=1)
    good = columns_of(rows)
    host.update(kit.job(rows, reinforce(), columns=good))
    before, version = flat(host.state()), host.version
    poisoned = {**good, "advantage": good["advantage"].copy()}
    poisoned["advantage"][4] = bad
    report = host.update(kit.job(rows, reinforce(), columns=poisoned))
    assert (report.steps, report.skipped, host.version) == (0, 1, version)
    after = flat(host.state())
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
    report = host.update(kit.job(rows, reinforce(), columns=good))
    assert (report.steps, report.skipped) == (1, 0)
    assert report.metrics["lr"].mean == pytest.approx(1e-2 * 2 / 10)
    assert all(np.isfinite(w).all() for w in host.state()["weights"].values())


def test_only_the_poisoned_minibatch_is_skipped(kit):
    host = kit.open(kit.families["llama"](), "update")
    rows = kit.random_rows(8, seed=1)
    columns = columns_of(rows)
    columns["advantage"][2] = np.nan
    report = host.update(kit.job(rows, reinforce(), columns=columns, minibatches=4))
    assert (report.steps, report.skipped) == (3, 1)
    assert math.isfinite(report.metrics["loss"].mean) and math.isfinite(report.metrics["grad_norm"].mean)


def test_a_step_without_trained_tokens_does_nothing(kit):
    host = kit.open(kit.families["llama"](), "update", optimizer=AdamW(lr=1e-2, weight_decay=0.5))
    rows = kit.random_rows(4)
    before = host.weights.export()
    report = host.update(kit.job(rows, reinforce(), random_mask(rows, share=0), columns=columns_of(rows)))
    assert (report.steps, report.skipped, report.tokens, host.version) == (0, 0, 0, 0)
    assert report.metrics["empty_steps"].total == 1
    for name, array in host.weights.export().items():
        np.testing.assert_array_equal(array, before[name])


def test_gradients_are_clipped_by_their_global_norm(kit):
    rows = kit.random_rows(6, seed=1)
    columns = columns_of(rows)
    free = kit.open(kit.families["llama"](), "update")
    norm = free.update(kit.job(rows, reinforce(), columns=columns)).metrics["grad_norm"].mean
    gradients = kit.gradients(free)
    assert norm == pytest.approx(
        math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values())), rel=1e-5
    )
    limit = norm / 4
    clipped = kit.open(kit.families["llama"](), "update", optimizer=AdamW(lr=1e-2, max_grad_norm=limit))
    report = clipped.update(kit.job(rows, reinforce(), columns=columns))
    assert report.metrics["grad_norm"].mean == pytest.approx(norm)
    assert report.metrics["grad_clipped"].mean == 1
    for name, gradient in kit.gradients(clipped).items():
        np.testing.assert_allclose(gradient, gradients[name] / 4, atol=1e-7, rtol=1e-4)


def test_small_steps_are_not_lost_in_bf16(kit):
    # 1000 steps of 1e-6 on parameters of exactly 1: fp32 masters reach 0.999
    @fr.loss
    def down(logits):
        return logits.sum(-1)

    host = kit.open(
        kit.bigram(torch.ones(2, 2)), "update", precision="bf16", tokenizer=kit.letters(vocab_size=2, eos_ids=frozenset()),
        optimizer=AdamW(lr=1e-6, max_grad_norm=None),
    )  # fmt: skip
    assert host.module.table.dtype == torch.bfloat16
    host.update(kit.job(kit.rows([[0], [1]], [[0], [1]]), down(), epochs=1000))
    np.testing.assert_allclose(host.state()["weights"]["table"], 0.999, atol=3e-5)
    np.testing.assert_array_equal(host.module.table.detach().float(), 1.0)  # rounded: nothing nearer in bf16


def test_bf16_trains_like_fp32(kit):
    rows = kit.random_rows(8, seed=2)
    columns = columns_of(rows)
    found = {}
    for precision in ("fp32", "bf16"):
        host = kit.open(kit.families["llama"](), "update", "logprobs", precision=precision, micro_batch_tokens=30)
        host.update(kit.job(rows, reinforce(), columns=columns))
        found[precision] = kit.gradients(host)
        assert all(
            p.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16) for p in host.module.parameters()
        )
        assert all(p.grad is None for p in host.module.parameters())
        assert host.module.model.rotary_emb.inv_freq.dtype == torch.float32
        for name, parameter in host.module.named_parameters():  # what forwards use is the masters, rounded
            rounded = torch.from_numpy(host.state()["weights"][name]).to(parameter.dtype)
            assert torch.equal(parameter, rounded), name
    whole = np.concatenate([g.ravel() for g in found["fp32"].values()])
    rounded = np.concatenate([g.ravel() for g in found["bf16"].values()])
    assert np.linalg.norm(whole - rounded) < 0.05 * np.linalg.norm(whole)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        (AdamW(lr=1.0, warmup_steps=4), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 99: 1.0}),
        (AdamW(lr=1.0), {0: 1.0, 7: 1.0}),
        (AdamW(lr=1.0, schedule="linear", total_steps=10, min_lr=0.2), {0: 1.0, 5: 0.6, 10: 0.2, 50: 0.2}),
        (AdamW(lr=1.0, schedule="linear", warmup_steps=2, total_steps=6), {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.5, 6: 0.0}),
        (AdamW(lr=1.0, schedule="cosine", total_steps=8, min_lr=0.5), {0: 1.0, 4: 0.75, 8: 0.5}),
    ],
)
def test_learning_rate(options, rates):
    for step, rate in rates.items():
        assert learning_rate(options, step) == pytest.approx(rate), step


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_restored_model_goes_on_as_if_never_stopped(kit):
    options = AdamW(lr=1e-2, warmup_steps=4, weight_decay=0.01)
    rows = kit.random_rows(6, seed=8)
    columns = columns_of(rows)

    def steps(host, numbers):
        return [host.update(kit.job(rows, reinforce(), columns=columns, minibatches=2, seed=i)) for i in numbers]

    straight = kit.open(kit.families["gpt2"](), "update", optimizer=options)
    reports = steps(straight, range(4))
    halfway = kit.open(kit.families["gpt2"](), "update", optimizer=options)
    steps(halfway, range(2))
    resumed = kit.open(kit.families["gpt2"](seed=9), "update", optimizer=options)
    resumed.restore(halfway.state())
    again = steps(resumed, range(2, 4))
    assert resumed.version == straight.version == 4
    assert [r.metrics["lr"].mean for r in again] == [r.metrics["lr"].mean for r in reports[2:]]
    for name, array in flat(straight.state()).items():
        np.testing.assert_array_equal(array, flat(resumed.state())[name], err_msg=name)


def test_the_schedule_can_be_left_alone(kit):
    options = AdamW(lr=1.0e-2, warmup_steps=4)
    rows = kit.random_rows(3)
    job = kit.job(rows, reinforce(), columns=columns_of(rows))
    first = kit.open(kit.families["llama"](), "update", optimizer=options)
    first.update(job)
    first.update(job)
    state = first.state()
    kept = kit.open(kit.families["llama"](), "update", optimizer=options)
    kept.restore(state)
    assert kept.update(job).metrics["lr"].mean == pytest.approx(0.75e-2)
    anew = kit.open(kit.families["llama"](), "update", optimizer=options)
    anew.restore({key: value for key, value in state.items() if key != "schedule"})
    assert anew.update(job).metrics["lr"].mean == pytest.approx(0.25e-2)


def test_parameters_without_optimizer_state_restore_and_half_a_state_does_not(kit):
    module = kit.families["llama"]()
    module.model.embed_tokens.weight.requires_grad_(False)  # frozen
    module.unused = torch.nn.Linear(3, 3)  # never hit by a gradient
    host = kit.open(module, "update")
    rows = kit.random_rows(3)
    job = kit.job(rows, reinforce(), columns=columns_of(rows))
    frozen = host.state()["weights"]["model.embed_tokens.weight"]
    host.update(job)
    state = host.state()
    np.testing.assert_array_equal(state["weights"]["model.embed_tokens.weight"], frozen)
    assert "model.embed_tokens.weight" not in state["optimizer"] and "unused.weight" not in state["optimizer"]
    assert "unused.weight" in state["weights"]
    other = kit.open(module, "update")
    other.restore(state)
    other.update(job)

    broken = {**state, "optimizer": {n: dict(e) for n, e in state["optimizer"].items()}}
    del broken["optimizer"]["lm_head.weight"]["exp_avg_sq"]
    with pytest.raises(EngineError, match=r"lm_head\.weight.*lacks exp_avg_sq"):
        kit.open(module, "update").restore(broken)
    renamed = {**state, "optimizer": {"lm_had.weight": state["optimizer"]["lm_head.weight"]}}
    with pytest.raises(EngineError, match="lm_had.*lm_head"):
        kit.open(module, "update").restore(renamed)
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        short = {n: a for n, a in state["weights"].items() if n != "lm_head.weight"}
        kit.open(module, "update").restore({**state, "weights": short})


def test_a_model_that_nothing_changed_keeps_a_checksum_only(kit):
    ref = kit.open(kit.families["llama"](), "logprobs")
    state = ref.state()
    assert "weights" not in state
    kit.open(kit.families["llama"](), "logprobs").restore(state)
    with pytest.raises(EngineError, match="other weights now"):
        kit.open(kit.families["llama"](seed=1), "logprobs").restore(state)
    ref.blend(kit.open(kit.families["llama"](seed=1), "source"), 0.0)
    assert "weights" in ref.state()


# --- loss expressions -------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(kit):
    return kit.rows([[3], [4, 5], [6]], [[7, 8, 9], [10], [11, 12]])


MASK = [[True, False, True], [True], [False, True]]


def test_terms_see_trained_tokens_only_and_rows_as_columns(kit, rows):
    seen = {}

    @fr.loss
    def look(
        logprobs, weights: fr.TOKEN.f32, wide: fr.TOKEN.i32[2], reward: fr.SAMPLE.f32, role: fr.SAMPLE.str,
        chosen: fr.SAMPLE.bool, segments, missing: fr.TOKEN.f32 = None, spread: fr.TOKEN.f32.or_broadcast("reward") = 0,
    ):  # fmt: skip
        seen.update(locals())
        return 0 * logprobs

    ids = rows.response_ids
    columns = {
        "weights": Ragged.like(np.arange(6, dtype=np.float64), ids),
        "wide": Ragged.like(np.arange(12, dtype=np.int32).reshape(6, 2), ids),
        "reward": np.array([1.0, 2.0, 3.0]),
        "role": np.array(["a", "b", "c"], dtype=object),
        "chosen": np.array([True, False, True]),
    }
    host = kit.open(kit.families["llama"](), "update")
    report = host.update(kit.job(rows, look(), MASK, columns=columns))
    assert report.tokens == 4
    # longest row first; rows stay together
    order = {"a": 0, "b": 1, "c": 2}
    rows_seen = [order[r] for r in seen["role"]]
    tokens = {0: [0, 2], 1: [3], 2: [5]}
    expected = [t for r in rows_seen for t in tokens[r]]
    assert seen["weights"].tolist() == expected and seen["weights"].dtype == torch.float32
    assert seen["wide"].tolist() == [[2 * t, 2 * t + 1] for t in expected] and seen["wide"].dtype == torch.int64
    assert seen["reward"].tolist() == [r + 1 for r in rows_seen]
    assert seen["chosen"].dtype == torch.bool
    assert seen["missing"] is None
    spread = [r + 1 for r in rows_seen for _ in tokens[r]]
    assert seen["spread"].tolist() == spread
    segments = seen["segments"]
    assert segments.num_rows == 3 and segments.lengths.tolist() == [len(tokens[r]) for r in rows_seen]
    assert segments.sum(seen["weights"]).tolist() == [sum(tokens[r]) for r in rows_seen]
    assert segments.mean(seen["weights"]).tolist() == [np.mean(tokens[r]) for r in rows_seen]
    assert segments.max(seen["weights"]).tolist() == [max(tokens[r]) for r in rows_seen]
    assert segments.min(seen["weights"]).tolist() == [min(tokens[r]) for r in rows_seen]
    assert segments.spread(seen["reward"]).tolist() == spread


def test_sums_scales_and_products(kit, rows):
    @fr.loss
    def per_token(logprobs, a: fr.TOKEN.f32):
        return a + 0 * logprobs

    @fr.loss(per="sample")
    def per_row(logprobs, segments, b: fr.SAMPLE.f32):
        return b + 0 * segments.sum(logprobs)

    a = Ragged.like(np.array([1, 2, 3, 4, 5, 6], np.float32), rows.response_ids)
    b = np.array([10, 20, 30], np.float32)
    full = [[True] * 3, [True], [True] * 2]
    sums, spread = 21 / 6, (10 * (1 + 2 + 3) + 20 * 4 + 30 * (5 + 6)) / 6
    cases = {
        3.5: per_token(),
        20.0: per_row(),
        2 * 3.5 - 20: 2 * per_token() - per_row(),
        91 / 6: per_token() * per_token(),
        1400 / 3: per_row() * per_row(),
        spread: per_row() * per_token(),
        # (a + b) * a = a a + b a
        91 / 6 + spread + 0.5 * sums: (per_token() + per_row()) * per_token() + 0.5 * per_token(),
    }
    for expected, loss in cases.items():
        for budget in (1, 100):
            host = kit.open(kit.families["llama"](), "update", micro_batch_tokens=budget)
            report = host.update(kit.job(rows, loss, full, columns={"a": a, "b": b}))
            assert report.metrics["loss"].mean == pytest.approx(expected, rel=1e-5), loss


def test_pairs_stay_together_and_average_over_pairs(kit):
    widths = []

    @fr.loss(locality=fr.group("pair"), per="sample", on_policy=False, max_staleness=None)
    def margin(logprobs, pair: fr.SAMPLE.str, chosen: fr.SAMPLE.bool, segments):
        total = segments.sum(logprobs)
        widths.append(sorted(pair))
        first = {p: total[i] for i, p in enumerate(pair) if chosen[i]}
        second = {p: total[i] for i, p in enumerate(pair) if not chosen[i]}
        return torch.stack([first[p] - second[p] for p in pair])

    rows = kit.random_rows(8, seed=6)
    pair = np.array(["a", "b", "c", "d", "a", "b", "c", "d"], dtype=object)
    columns = {"pair": pair, "chosen": np.arange(8) < 4}
    losses = []
    for budget in (1, 30, 1000):
        host = kit.open(kit.families["llama"](), "update", "logprobs", micro_batch_tokens=budget)
        sums = host.logprobs(rows).sum()
        widths.clear()
        report = host.update(kit.job(rows, margin(), columns=columns, group_by=pair))
        assert all(seen == sorted(2 * list(set(seen))) for seen in widths)
        assert sorted(p for seen in widths for p in seen) == sorted(pair)
        losses.append(report.metrics["loss"].mean)
        assert losses[-1] == pytest.approx((sums[:4] - sums[4:]).mean(), rel=1e-4)
    # pairs stay together in mini-batches too
    host.update(kit.job(rows, margin(), columns=columns, group_by=pair, minibatches=4))
    with pytest.raises(DataError, match="5 mini-batches"):
        host.update(kit.job(rows, margin(), columns=columns, group_by=pair, minibatches=5))


def test_a_row_without_trained_tokens_counts_nowhere_even_in_a_pair(kit):
    @fr.loss(locality=fr.group("pair"), per="sample", on_policy=False)
    def ones(pair: fr.SAMPLE.str, logprobs, segments):
        return 1 + 0 * segments.sum(logprobs)

    rows = kit.random_rows(6, seed=6)
    pair = np.array(["a", "a", "b", "b", "c", "c"], dtype=object)
    mask = [[i != 1 and i < 4] * n for i, n in enumerate(rows.response_ids.lengths)]
    host = kit.open(kit.families["llama"](), "update")
    report = host.update(kit.job(rows, ones(), mask, columns={"pair": pair}, group_by=pair))
    assert report.metrics["loss"].mean == pytest.approx(1)


def test_only_the_live_columns_asked_for_are_computed(kit, rows, monkeypatch):
    asked = []
    original = forward_module.token_stats

    def spy(*args, with_entropy):
        asked.append(with_entropy)
        return original(*args, with_entropy=with_entropy)

    monkeypatch.setattr(forward_module, "token_stats", spy)
    host = kit.open(kit.families["llama"](), "update")
    columns = columns_of(rows)
    host.update(kit.job(rows, reinforce(), columns=columns))
    assert asked == [False]
    host.update(kit.job(rows, with_entropy(), columns=columns))
    assert asked == [False, True]


def test_metrics_of_two_terms_with_one_name_stay_apart(kit, rows):
    @fr.loss
    def one(logprobs):
        return logprobs, {"size": torch.ones_like(logprobs)}

    @fr.loss
    def two(logprobs, segments):
        return logprobs, {"size": 2 * torch.ones(segments.num_rows)}

    report = kit.open(kit.families["llama"](), "update").update(kit.job(rows, one() + two(), MASK))
    assert (report.metrics["size"].mean, report.metrics["size"].count) == (1, 4)
    assert (report.metrics["size/two"].mean, report.metrics["size/two"].count) == (2, 3)


def test_what_a_term_returns_is_checked(kit, rows):
    @fr.loss
    def averaged(logprobs):
        return logprobs.mean()

    @fr.loss
    def scalar_metric(logprobs):
        return logprobs, {"kl": 0.5}

    host = kit.open(kit.families["llama"](), "update")
    with pytest.raises(OperatorError, match=r"'averaged'.*one number per trained token \[4\].*shape \(\)"):
        host.update(kit.job(rows, averaged(), MASK))
    with pytest.raises(OperatorError, match="metric 'kl' of loss 'scalar_metric'"):
        host.update(kit.job(rows, scalar_metric(), MASK))
    with pytest.raises(SchemaError, match="'advantage'"):
        host.update(kit.job(rows, reinforce(), MASK))
    with pytest.raises(EngineError, match="opened for 'update'"):
        kit.open(kit.families["llama"](), "logprobs").update(kit.job(rows, reinforce(), MASK))
    with pytest.raises(DataError, match="temperatures above 0"):
        host.update(kit.job(kit.rows([[3]], [[4]], 0.0), with_entropy()))
