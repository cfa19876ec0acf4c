"""One process of `one_copy`: iterations of sampling and training, with the weights twice on the device or once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flowrl as fr
from flowrl.engines.host_torch import TorchHost
from flowrl.engines.launch.place import join
from flowrl.engines.launch.protocol import Site
from flowrl.engines.launch.torch_ranks import TorchRanks
from flowrl.engines.mesh.ranks import whole_of
from flowrl.engines.offload.state import local_of
from flowrl.engines.protocol import SampleKey, SampleRequest, SamplingOptions, TokenRows, UpdateJob
from flowrl.mesh import Layout
from flowrl.schema.ragged import Ragged
from flowrl_operators import losses

WAIT_S = 600.0
"""For the other process, at most."""
FIRST_ID = 3
"""Of the tokens that prompts are drawn from."""


class Numbers:
    """A tokenizer for ids that stand for nothing; no response ends before its last token."""

    eos_ids: frozenset[int] = frozenset()
    pad_id = 0
    fingerprint = "numbers"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return self.encode_continuation(text)

    def encode_continuation(self, text: str) -> list[int]:
        return [int(one) for one in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(str(one) for one in ids)


class Bench:
    """A trainer cut over all ranks, and a sampler's copy on each."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said
        self.board = join(timeout_s=WAIT_S)
        self.board.num_runs, self.board.timeout_s = 1, WAIT_S
        self.rank, ranks = self.board.rank, tuple(range(self.board.world))
        self.device = torch.device("cuda", self.rank) if said["is_gpu"] else torch.device("cpu")
        self.engine = TorchRanks(self.board)
        if said["is_gpu"]:
            # memory that another process has mapped is not given back when its owner lets go of it
            self.engine._devices.wire = lambda ranks: "nccl"  # type: ignore[method-assign]
        self.training = Site("policy", ranks, Layout.parse(f"f{len(ranks)}"), frozenset({"update"}))
        self.sampling = Site("policy", ranks, Layout.parse(f"d{len(ranks)}"), frozenset({"generate"}))
        options: dict[str, Any] = {
            "tokenizer": Numbers(said["vocab_size"]), "device": self.device.type, "precision": said["precision"],
            "micro_batch_tokens": said["micro_batch_tokens"],
        }  # fmt: skip
        trained = fr.Model(said["folder"], optimizer=fr.AdamW(lr=1e-5), gradient_checkpointing=True, **options)
        sampled = fr.Model(said["folder"], sampler=said["sampler"], sampler_options=said["sampler_options"], **options)
        for site, model in ((self.training, trained), (self.sampling, sampled)):
            if why := self.engine.check(site, model):
                raise fr.ConfigError(f"{site.name}: {why}")
        self.trainer = self._open(self.training, trained)
        self.sampler = self._open(self.sampling, sampled)
        self.engine.connect([(self.training, self.sampling)])
        self.states: dict[str, int] = {}

    def _open(self, site: Site, model: fr.Model) -> TorchHost:
        host = self.engine.open(site, model, seed=0)
        assert isinstance(host, TorchHost)
        return host

    # --- the parts of an iteration -----------------------------------------------------------------------------------

    def sample(self, step: int) -> TokenRows:
        """This rank's prompts, each answered `group` times; then all ranks' rows, which training takes."""
        said, draw = self.said, np.random.default_rng(step)
        prompts = draw.integers(FIRST_ID, said["vocab_size"], (said["prompts"], said["prompt_tokens"]))
        mine = range(self.rank, said["prompts"], self.board.world)
        requests = [
            SampleRequest(prompts[p].tolist(), said["response_tokens"], SampleKey(0, step, "policy", str(p), i))
            for p in mine
            for i in range(said["group"])
        ]
        responses = [one.ids for one in self.sampler.generate(requests, SamplingOptions())]
        self.board.post(f"{step}/responses/{self.rank}", json.dumps(responses).encode())
        keys = [f"{step}/responses/{rank}" for rank in range(self.board.world)]
        found = [json.loads(data) for data in self.board.get(keys, timeout_s=WAIT_S, what=lambda _: "for responses")]
        rows: list[list[int]] = []
        answers: list[list[int]] = []
        for rank in range(self.board.world):
            of_rank = [p for p in range(rank, said["prompts"], self.board.world) for _ in range(said["group"])]
            rows += [prompts[p].tolist() for p in of_rank]
            answers += found[rank]
        return TokenRows(Ragged.of(rows, np.int32), Ragged.of(answers, np.int32), np.ones(len(rows), np.float32))

    def train(self, rows: TokenRows, step: int) -> None:
        advantage = np.random.default_rng(100 + step).normal(size=len(rows)).astype(np.float32)
        mask = Ragged.like(np.ones(len(rows.response_ids.values), bool), rows.response_ids)
        report = self.trainer.update(UpdateJob(rows, mask, {"advantage": advantage}, losses.ppo_clip(0.2), seed=step))
        assert report.steps == 1, "a step that is skipped would measure nothing"

    def reshard(self) -> None:
        """Box by box, from shards straight into the sampler's parameters."""
        self.engine.bring(self.training, self.trainer, self.sampling, self.sampler, self.trainer.version)

    @torch.no_grad()
    def gather(self) -> None:
        """Each parameter whole, and then copied: how weights come over without an edge."""
        target = self.sampler.weights.parameters
        for name, tensor in self.trainer.weights.masters.items():
            target[name].copy_(whole_of(tensor))
        self.sampler.version = self.trainer.version

    @contextmanager
    def released(self) -> Iterator[None]:
        """Inside, the sampler's weights take no memory. What they were is not kept: the edge writes all of them."""
        kept = [parameter.untyped_storage() for parameter in self.sampler.weights.parameters.values()]
        sizes = {id(one): one.nbytes() for one in kept}  # a tied one is there once
        for one in kept:
            one.resize_(0)
        try:
            yield
        finally:
            for one in kept:
                one.resize_(sizes[id(one)])

    def note(self, when: str) -> None:
        """Bytes of weights, moments and gradients on the device."""
        storages = {}
        for host in (self.trainer, self.sampler):
            held = [*host.weights.parameters.values(), *host.weights.masters.values(), *host._moments()]
            for tensor in held:
                storage = local_of(tensor.detach()).untyped_storage()
                storages[id(storage._cdata) if storage.nbytes() == 0 else storage.data_ptr()] = storage.nbytes()
        self.states[when] = max(self.states.get(when, 0), sum(storages.values()))

    # --- iterations --------------------------------------------------------------------------------------------------

    def two_copies(self, step: int) -> None:
        rows = self.sample(step)
        self.note("sampling")
        self.train(rows, step)
        self.note("training")
        self.gather()

    def one_copy(self, step: int) -> None:
        self.trainer.offload()
        rows = self.sample(step)
        self.note("sampling")
        if self.said["sampler"] == "transformers":
            with self.released():
                self._trained_here(rows, step)
        else:  # vLLM keeps its own
            self._trained_here(rows, step)
        self.reshard()

    def _trained_here(self, rows: TokenRows, step: int) -> None:
        self.trainer.onload()
        self.train(rows, step)
        self.note("training")
        # what only training needs leaves before the sampler's weights come; the shards themselves stay for the edge
        self.trainer._home.offload(keep_model=True)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self) -> dict[str, Any]:
        """Seconds of each iteration after the first, and the most memory."""
        iteration: Callable[[int], None] = getattr(self, self.said["way"])
        seconds = []
        for step in range(self.said["steps"] + 1):
            self.settle()
            began = time.perf_counter()
            iteration(step)
            self.settle()
            seconds.append(time.perf_counter() - began)
            if step == 0 and self.device.type == "cuda":  # opening models, and making moments, is another matter
                torch.cuda.reset_peak_memory_stats(self.device)
        found: dict[str, Any] = {"seconds": seconds[1:], "first_s": seconds[0], "states": self.states}
        found["host_bytes"] = self.trainer.host_bytes + self.sampler.host_bytes
        found["sum"] = self.check()
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            found |= {
                "peak_bytes": torch.cuda.max_memory_allocated(self.device),
                "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
                "taken_bytes": total - free,
            }
        return found

    def check(self) -> float:
        """The sampler has the trainer's weights, bit for bit in its precision; the sum of all of them.

        Errors: AssertionError where it has not.
        """
        self.trainer.onload()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, tensor in self.trainer.weights.masters.items():
            held: Tensor = self.sampler.weights.parameters[name].detach()
            assert torch.equal(whole_of(tensor).to(held.dtype), held), f"{name} is another in the sampler"
            total += held.double().sum()
        return float(total)


def measure(said: dict[str, Any]) -> None:
    """On each rank; what was found is written to the job's folder of results."""
    if said["is_gpu"]:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    bench = Bench(said)
    found = bench.run()
    Path(said["results"], f"{bench.rank}.json").write_text(json.dumps(found))
    bench.engine.close()
