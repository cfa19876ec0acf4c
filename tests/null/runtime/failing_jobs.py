"""Ranks that fail on purpose: one raises, is killed, or stands still, in the second step."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import rank_jobs

import flowrl as fr
from flowrl.engines.launch.spawn import run_job
from flowrl.runtime.ranks import run_ranks
from flowrl_operators import advantages, losses

PROMPTS = [{"prompt_id": f"p{i}", "prompt": f"{i}+1="} for i in range(8)]


@fr.operator(writes={"reward": fr.SAMPLE.f32})
def troubled(response, max_policy_version: fr.SAMPLE.i32, sample_index: fr.SAMPLE.i32, *, how: str, rank: int):
    """Goes well for the rows of the first step, which the first version of the policy has sampled."""
    if os.environ.get("RANK") == str(rank) and len(response) and max_policy_version[0] > 0:
        if how == "raise":
            raise ValueError("the judge is asleep")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "remove":
            gone = os.environ["FLOWRL_JOB"] + ".gone"
            os.rename(os.environ["FLOWRL_JOB"], gone)  # at once: others write into it meanwhile
            shutil.rmtree(gone)
        if how == "stall":
            while True:
                signal.pause()
    return np.array([len(text) for text in response], np.float32) + sample_index


@fr.flow
def rewarded(prompts, policy, *, how="", rank=2):
    rows = fr.rollout(policy, prompts, n=4)
    rows = troubled(rows, how=how, rank=rank)
    rows = advantages.group_norm(rows)
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))


def fails(said: dict[str, Any]) -> None:
    """On each rank."""
    rank = os.environ["RANK"]
    Path(said["folder"], f"pid.{rank}").write_text(json.dumps([os.getpid(), os.environ["FLOWRL_JOB"]]))
    graph = rewarded.graph(how=said["how"], rank=said["rank"])
    plan = rank_jobs.plan_of(graph, int(os.environ["WORLD_SIZE"]))
    run_ranks(
        graph, plan=plan, steps=said.get("steps", 3), engine="null", timeout_s=said["timeout_s"],
        out=str(Path(said["folder"], "runs")),
        prompts=PROMPTS, policy=rank_jobs.MODEL, batch=4, max_tokens=6, progress="off", reward_workers=0, record=("rollout",),
    )  # fmt: skip


def unlike(said: dict[str, Any]) -> None:
    """Rank 1 is given something else than rank 0."""
    rank = os.environ["RANK"]
    Path(said["folder"], f"pid.{rank}").write_text(json.dumps([os.getpid(), os.environ["FLOWRL_JOB"]]))
    graph = rewarded.graph()
    given: dict[str, Any] = {"prompts": PROMPTS, "seed": 0, "batch": 4}
    others = {"seed": 1, "batch": 3, "prompts": PROMPTS[::-1]}
    if rank == "1":
        given |= {name: others[name] for name in said["others"]}
    run_ranks(
        graph, plan=rank_jobs.plan_of(graph, 2), steps=said["steps"], engine="null", timeout_s=60.0, out=None,
        policy=rank_jobs.MODEL, max_tokens=6, progress="off", reward_workers=0, **given,
    )  # fmt: skip


def stubborn(said: dict[str, Any]) -> None:
    """One rank raises; another neither looks at the board nor listens when it is asked to end."""
    rank = os.environ["RANK"]
    Path(said["folder"], f"pid.{rank}").write_text(json.dumps([os.getpid(), os.environ["FLOWRL_JOB"]]))
    if rank == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(said["folder"], "deaf").touch()
        while True:
            signal.pause()
    while not Path(said["folder"], "deaf").exists():
        os.sched_yield()
    raise ValueError("gives up")


def launch(said: dict[str, Any]) -> None:
    """A launcher of its own, to be killed."""
    run_job(f"{__file__}:waits", said, 2)


def launch_long(said: dict[str, Any]) -> None:
    """A launcher of its own, to be interrupted."""
    run_job(f"{__file__}:fails", said, 2)


def waits(said: dict[str, Any]) -> None:
    path = Path(said["folder"], f"pid.{os.environ['RANK']}")
    aside = path.with_name(f".{path.name}")  # one for each rank
    aside.write_text(json.dumps([os.getpid(), os.environ["FLOWRL_JOB"]]))
    aside.replace(path)
    while True:
        signal.pause()
