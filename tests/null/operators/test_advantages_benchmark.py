"""The benchmark of advantages compares equal work: no time is measured here."""

import numpy as np

import flowrl as fr
from benchmarks import operators
from flowrl_operators import advantages


def test_both_ways_of_each_case_give_the_same() -> None:
    draw = np.random.default_rng(0)
    keys = np.asarray([f"p{n}" for n in draw.integers(0, 9, 60)], object)
    reward = draw.choice([0.0, 1.0, 0.5], 60)
    mask = fr.Ragged(np.ones(120, bool), np.arange(61) * 2)
    for call, more in ((advantages.group_norm, None), (advantages.rloo, None), (advantages.opo, mask)):
        apart = operators._group_by_group(call, reward, keys, more)
        np.testing.assert_allclose(call(reward, keys, more), apart, atol=1e-12)
        assert np.any(apart)


def test_the_loop_over_tokens_is_gae() -> None:
    draw = np.random.default_rng(0)
    offsets = np.concatenate(([0], np.cumsum(operators._lengths(20, 400))))
    values = fr.Ragged(draw.normal(size=int(offsets[-1])), offsets)
    mask, reward = fr.Ragged.like(np.ones(len(values.values), bool), values), draw.normal(size=20)
    found = advantages.gae(reward, values, mask, None, None, whiten=False)["advantages"]
    np.testing.assert_allclose(operators._gae_by_loop(reward, values, 0.95), found.values, atol=1e-9)
