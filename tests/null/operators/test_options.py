"""Numbers that make no sense as an option are refused; each of these once gave an answer, and a wrong one."""

import math
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, FlowError
from flowrl_operators import advantages, evaluate, filters, rewards

REWARD = np.asarray([1.0, 0.0, 0.5, 2.0])
GROUP = np.asarray(["a", "a", "b", "b"], object)
MASK = fr.Ragged(np.ones(6, bool), np.asarray([0, 2, 3, 4, 6]))
LOGPROBS = fr.Ragged.like(np.linspace(-2.0, -0.1, 6), MASK)
OTHERS = fr.Ragged.like(np.full(6, -1.0), MASK)
IDS = fr.Ragged.like(np.arange(6), MASK)
NAN, INF = math.nan, math.inf

COLUMNS: dict[Any, tuple[Any, ...]] = {
    advantages.group_norm: (REWARD, GROUP, MASK),
    advantages.batch_norm: (REWARD, None, MASK),
    advantages.rloo: (REWARD, GROUP, MASK),
    advantages.gpg: (REWARD, GROUP, MASK),
    advantages.maxrl: (REWARD, GROUP, MASK),
    advantages.pass_at_k: (REWARD, GROUP, MASK),
    advantages.gae: (REWARD, OTHERS, MASK),
    advantages.reinforce: (REWARD, MASK),
    advantages.reinforce_pp: (REWARD, MASK),
    advantages.reinforce_pp_baseline: (REWARD, GROUP, MASK),
    advantages.whiten: (LOGPROBS, MASK),
    advantages.optimal_token_baseline: (REWARD, GROUP, LOGPROBS, OTHERS, MASK),
    rewards.kl_shaped: (REWARD, LOGPROBS, OTHERS, MASK),
    rewards.kl_penalised: (REWARD, LOGPROBS, OTHERS, MASK),
    rewards.adaptive_kl_shaped: (REWARD, LOGPROBS, OTHERS, MASK),
    rewards.overlong: (REWARD, IDS),
    rewards.brevity: (REWARD, IDS),
    rewards.stop_properly: (REWARD, np.asarray(["length"] * 4, object)),
    rewards.repetition: ([1, 2, 1, 2],),
    filters.group_has_signal: (REWARD, GROUP),
    filters.top: (REWARD,),
}


@pytest.mark.parametrize(
    ("operator", "config", "message"),
    [
        (advantages.group_norm, {"eps": NAN}, "eps >= 0; found eps=nan"),
        (advantages.batch_norm, {"eps": -1e-6}, "eps >= 0; found eps=-1e-06"),
        (advantages.rloo, {"reward_clip": (1.0, 0.0)}, "reward_clip is two numbers, the least and the greatest; found"),
        (advantages.rloo, {"reward_clip": (1.0,)}, "reward_clip is two numbers"),
        (advantages.rloo, {"reward_clip": (NAN, 1.0)}, "reward_clip is two numbers"),
        (advantages.gpg, {"divisor": 0.0}, "divisor > 0; found divisor=0.0"),
        (advantages.gpg, {"single": "rewards"}, "single is one of zero, reward; found 'rewards'"),
        (advantages.maxrl, {"single": "rewards"}, "single is one of zero, reward; found 'rewards'"),
        (advantages.maxrl, {"eps": -1.0}, "eps >= 0; found eps=-1.0"),
        (advantages.pass_at_k, {"scale": "group", "eps": NAN}, "eps >= 0; found eps=nan"),
        (advantages.gae, {"clip": -1.0}, "clip > 0, adaptive > 0 or None; found clip=-1.0"),
        (advantages.gae, {"adaptive": NAN}, "found clip=None, adaptive=nan"),
        (advantages.gae, {"eps": -1.0}, "eps >= 0 and count_eps >= 0; found eps=-1.0"),
        (advantages.reinforce, {"clip": NAN}, "clip > 0 or None; found clip=nan"),
        (advantages.reinforce_pp, {"eps": NAN}, "found eps=nan"),
        (advantages.reinforce_pp_baseline, {"count_eps": NAN}, "found eps=1e-08, count_eps=nan"),
        (advantages.whiten, {"count_eps": -1.0}, "count_eps=-1.0"),
        (advantages.optimal_token_baseline, {"eps": NAN}, "eps >= 0; found eps=nan"),
        (rewards.kl_shaped, {"coefficient": NAN}, "a finite coefficient; found coefficient=nan"),
        (rewards.kl_shaped, {"coefficient": 0.1, "kind": "k3", "log_ratio_clip": -1.0}, "found log_ratio_clip=-1.0"),
        (rewards.kl_shaped, {"coefficient": 0.1, "value_clip": -1.0}, "value_clip=-1.0"),
        (rewards.kl_shaped, {"coefficient": 0.1, "reward_clip": (1.0, -1.0)}, "reward_clip is two numbers"),
        (rewards.kl_penalised, {"coefficient": INF}, "a finite coefficient; found coefficient=inf"),
        (
            rewards.adaptive_kl_shaped,
            {"coefficient": 0.1, "target": NAN, "horizon": 10.0, "state": fr.State()},
            "target > 0 and horizon > 0; found target=nan, horizon=10.0",
        ),
        (rewards.overlong, {"soft": 1, "weight": NAN}, "a finite weight; found weight=nan"),
        (rewards.brevity, {"weight": INF}, "a finite weight; found weight=inf"),
        (rewards.stop_properly, {"factor": NAN}, "at least 0; found nan"),
        (rewards.repetition, {"penalty": NAN}, "at most 0; found nan"),
        (filters.group_has_signal, {"eps": NAN}, "eps >= 0; found eps=nan"),
        (filters.top, {"least": NAN}, "a number or None as least; found least=nan"),
    ],
)
def test_it_is_refused(operator: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        operator(*COLUMNS[operator], **config)


@pytest.mark.parametrize("k", [(), (0,), (2, 2), 8, (1.5,)])
def test_numbers_of_tries(k: Any) -> None:
    with pytest.raises(FlowError, match="k"):
        evaluate.pass_rates(k=k)


def test_a_log_probability_above_0_leaves_other_groups_alone() -> None:
    ones = fr.Ragged.like(np.ones(6), MASK)
    good = advantages.optimal_token_baseline(REWARD, GROUP, LOGPROBS, ones, MASK)["advantages"].values
    strange = fr.Ragged.like(np.where(np.arange(6) == 0, 1e4, LOGPROBS.values), MASK)
    found = advantages.optimal_token_baseline(REWARD, GROUP, strange, ones, MASK)["advantages"].values
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[3:], good[3:])
