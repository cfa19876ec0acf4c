"""vLLM inside this process, on its device, as a `Sampler`.

    open    config of the trainer's module -> vLLM with dummy weights -> load() -> proof against the module
    load    check names and shapes -> layerwise reload in place -> repack tied heads -> drop the prefix cache -> version
    sample  one vLLM request per SampleRequest, stepped here so that stop strings of any tokenizer end a response early

vLLM never sees a tokenizer: prompts go in and responses come out as ids.

What a sample key promises here: tokens depend on the key and on the logits, not on the other requests of the batch. The
logits themselves are computed by kernels whose rounding may depend on the batch (about 1e-6 in fp32, 1e-2 in bf16), so a
draw that falls within that distance of the border between two tokens can come out differently in another batch.

With several ranks of a job, each has an engine of its own, or those of a `Team` share one by tensor parallelism: then each makes
the same calls, and each gets all responses.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import math
import os
import random
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from flowrl.engines.protocol import Sampled, SampleKey, SampleRequest, SamplingOptions
from flowrl.engines.vllm_groups import OwnGroups, Team, executor_of
from flowrl.errors import ConfigError, DataError, EngineError, MissingExtra, StaleWeightsError
from flowrl.model import Model, Tokenizer
from flowrl.schema.columns import nearest

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: its weights can be overwritten directly
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about tokenizers, preloaded libraries and weights that never load
    "VLLM_NO_USAGE_STATS": "1",
}
"""The environment variables of this sampler, the only ones it sets. A value that is there already stays."""

OWNED = {
    "model": "it comes from the Model",
    "tokenizer": "ids go in and out",
    "skip_tokenizer_init": "ids go in and out",
    "dtype": "set Model(precision=...)",
    "load_format": "the weights come from the trainer",
    "logprobs_mode": "log-probabilities are those of the distribution sampled from",
    "seed": "every response has a seed of its own",
    "tensor_parallel_size": "this sampler uses one device, or the ranks that a plan gives it",
    "pipeline_parallel_size": "this sampler uses one device, or the ranks that a plan gives it",
    "data_parallel_size": "this sampler uses one device, or the ranks that a plan gives it",
    "distributed_executor_backend": "this sampler runs inside the process",
    "quantization": "the weights are overwritten by the trainer's",
}
"""vLLM options that the sampler sets itself, with the reason."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
TOLERANCE = {"fp32": 0.02, "bf16": 0.5}
"""Nats: largest mean |difference| to the module's own log-probabilities that opening accepts. Rounding stays far below,
a weight in the wrong place far above."""
MIB = 1 << 20
GPU_SHARE = 0.4
"""Of the GPU's memory, for weights, cache and scratch; vLLM's own 0.92 would leave the trainer nothing."""
MAX_PHANTOMS = 1024
"""Logit biases a request may have on a GPU."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower one silently and refuses a higher one."""

_open: set[VllmSampler] = set()
"""Samplers of this process. vLLM keeps one set of process groups for all of them: the last one to close destroys it."""
_groups: list[OwnGroups] = []
"""These groups; one, or none while no sampler is open."""


class VllmSampler:
    """Samples with vLLM, from its own copy of a module's weights.

    Several may be open in one process, each with its own weights and cache.

    Errors: MissingExtra without vLLM; ConfigError for an unknown option; EngineError when vLLM cannot run this model, or
    gives other log-probabilities than the module itself, and when the process has a sampler with another team.
    """

    version: int
    """Version of the weights it holds; 0 after opening."""

    def __init__(self, module: Any, tokenizer: Tokenizer, model: Model, team: Team | None = None) -> None:
        """`module`: the trainer's Transformers module; its config shapes vLLM and its weights are loaded. `model`:
        precision, max_context and `sampler_options` (any option of `vllm.LLM` that is not in `OWNED`). `team`: this
        process and those that share its engine; all of them open it together."""
        vllm = import_vllm()
        self._tokenizer = tokenizer
        self._weights = Weights.of(module)
        self._ids = itertools.count()
        self._stale: str | None = "no weights were loaded yet"
        self._folder = tempfile.TemporaryDirectory(prefix="flowrl-vllm-")
        export_config(module, self._folder.name)
        team = team or Team()
        options = engine_options(module.config, model, vllm, team)
        self._llm: Any = None
        self._groups = groups_of(team)
        try:
            let_numba_be_looked_at()
            with global_state_kept(), self._groups.inside():
                self._llm = vllm.LLM(self._folder.name, **options)
        except Exception as error:
            # vLLM raises ValueError, RuntimeError, AssertionError, pydantic's: all mean "not this"
            self._folder.cleanup()
            forget_groups()
            raise EngineError(
                f"vLLM could not open {type(module).__name__} with {options}: {type(error).__name__}: {error}; change "
                "Model(sampler_options=...), or use sampler='transformers'"
            ) from error
        _open.add(self)
        try:
            vocabulary = module.config.get_text_config().vocab_size
            self._vocabulary = int(vocabulary)
            self._phantoms = phantom_biases(tokenizer.vocab_size, int(vocabulary))
            self._max_context = int(self._llm.llm_engine.model_config.max_model_len)
            self.load(self._weights.current(module), 0)
            self._prove(module, model.precision)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------- sampling

    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]:
        """One response per request, in order.

        Errors: StaleWeightsError after a failed `load`; DataError for a prompt that leaves no room for a token;
        ConfigError for a temperature vLLM cannot sample at.
        """
        engine = self._engine()
        if self._stale:
            raise StaleWeightsError(f"the vLLM sampler cannot sample: {self._stale}; load all weights again")
        check_options(options)
        for request in requests:
            self._check_request(request)
        stops = StopStrings(options.stop, self._tokenizer) if options.stop else None
        responses = {str(next(self._ids)): Response() for _ in requests}
        running = dict(responses)
        # vLLM draws from torch's own generator as well, and drops the number where a request has a seed
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), self._groups.inside():
            try:
                for name, request in zip(responses, requests, strict=True):
                    prompt = {"prompt_token_ids": list(request.prompt_ids)}
                    engine.add_request(name, prompt, self._params(request, options))
                while running:
                    self._step(engine, running, stops)
            finally:
                if running:  # interrupted, or vLLM failed: what is left would come out of the next call
                    engine.abort_request(list(running))
        return [response.sampled(stops) for response in responses.values()]

    @staticmethod
    def _step(engine: Any, running: dict[str, Response], stops: StopStrings | None) -> None:
        """One step of vLLM; the responses that it ends leave `running`."""
        for output in engine.step():
            response = running.get(output.request_id)
            if response is None:  # aborted while its last step was under way
                continue
            response.extend(output.outputs[0])
            if not output.finished:
                if not stops or not stops.reached(response.ids):
                    continue
                engine.abort_request([output.request_id])
            del running[output.request_id]

    def _params(self, request: SampleRequest, options: SamplingOptions) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=request.key.number(),
            max_tokens=request.max_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # only the tokenizer's end tokens end a response: not the ones in the model's own configuration
            ignore_eos=True,
            stop_token_ids=sorted(self._tokenizer.eos_ids),
            # a bias rather than a list of allowed ids: there are few phantom ids and many real ones
            logit_bias=self._phantoms or None,
            output_kind=RequestOutputKind.DELTA if options.stop else RequestOutputKind.FINAL_ONLY,
        )

    def _check_request(self, request: SampleRequest) -> None:
        length = len(request.prompt_ids)
        if not 0 < length < self._max_context:
            raise DataError(
                f"prompt '{request.key.prompt_id}' has {length} tokens; the vLLM sampler takes 1 to "
                f"{self._max_context - 1}, which leaves room for one token in a context of {self._max_context}; shorten "
                "the prompt or raise Model(max_context=...)"
            )
        if request.max_tokens < 1:
            raise DataError(f"prompt '{request.key.prompt_id}' asks for {request.max_tokens} tokens; ask for 1 or more")
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= self._vocabulary:
            raise DataError(
                f"prompt '{request.key.prompt_id}' holds the id {low if low < 0 else high}; the model knows 0 to "
                f"{self._vocabulary - 1}; was it encoded with another tokenizer?"
            )

    # -------------------------------------------------------------------------------------------------- weights

    def load(self, named: Iterable[tuple[str, Any]], version: int) -> None:
        """Overwrite the weights in place from (Hugging Face name, tensor) pairs and drop the prefix cache.

        All names and shapes are checked before vLLM is touched. Whatever goes wrong, the sampler then refuses to sample
        until a `load` succeeds. Errors: EngineError naming what is missing, unknown or of another shape.
        """
        engine = self._engine()
        self._stale = f"the load of version {version} did not finish"
        pairs = self._weights.checked(named)
        try:
            with self._groups.inside():
                engine.collective_rpc(partial(overwrite, pairs=pairs))
        except EngineError:
            raise
        except Exception as error:  # any failure inside vLLM's loaders; the sampler stays stale
            raise EngineError(
                f"vLLM failed while loading version {version}: {type(error).__name__}: {error}; load all weights again, "
                "or close the sampler and open another"
            ) from error
        # no way of updating weights does this, and cached blocks would keep keys and values of the old weights
        if not engine.reset_prefix_cache():
            raise EngineError("vLLM kept its prefix cache because requests are still running; end them before load()")
        self.version = version
        self._stale = None

    def _prove(self, module: Any, precision: str) -> None:
        """Compare a few sampled tokens with the module's own log-probabilities; this also proves `load`, which put the
        weights there."""
        length = min(16, self._max_context // 2)
        prompts = [[(start + 7 * i) % self._vocabulary for i in range(max(1, length))] for start in (1, 3)]
        requests = [
            SampleRequest(ids, min(8, self._max_context - len(ids)), SampleKey(0, 0, "proof", str(row), 0))
            for row, ids in enumerate(prompts)
        ]
        responses = self.generate(requests, SamplingOptions())
        distances: list[float] = []
        for ids, response in zip(prompts, responses, strict=True):
            own = module_logprobs(module, ids, response.ids, sorted(self._phantoms))
            distances.extend(abs(a - b) for a, b in zip(own, response.logprobs, strict=True))
        mean = sum(distances) / len(distances)
        if not mean <= TOLERANCE[precision]:
            raise EngineError(
                f"vLLM's log-probabilities of {type(module).__name__} differ from the module's by {mean:.3g} nats on "
                f"average, {TOLERANCE[precision]} is accepted in {precision}; vLLM computes this model differently, use "
                "sampler='transformers'"
            )

    # -------------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Free weights and cache. The other samplers of the process go on working."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        _open.discard(self)
        with self._groups.inside(), process_groups_kept(bool(_open)):
            llm.llm_engine.collective_rpc(release_cache)
            llm.llm_engine.engine_core.shutdown()
        del llm
        forget_groups()
        self._folder.cleanup()

    def _engine(self) -> Any:
        if self._llm is None:
            raise EngineError("the vLLM sampler is closed; open another")
        return self._llm.llm_engine


# ------------------------------------------------------------------------------------------------------- responses


def phantom_biases(real: int, vocabulary: int) -> dict[int, float]:
    """-inf for every id that the model has and the tokenizer lacks. Errors: ConfigError when there are more than vLLM's
    GPU kernel masks."""
    from vllm.platforms import current_platform

    phantoms = dict.fromkeys(range(min(real, vocabulary), vocabulary), -math.inf)
    if len(phantoms) > MAX_PHANTOMS and not current_platform.is_cpu():
        raise ConfigError(
            f"the model has {vocabulary} ids, {len(phantoms)} more than the tokenizer; vLLM masks {MAX_PHANTOMS} at most; "
            "cut the model's embedding (resize_token_embeddings), or use sampler='transformers'"
        )
    return phantoms


@dataclass(slots=True)
class Response:
    """A response while it grows."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    """vLLM's finish reason; None when it was ended here, for a stop string."""

    def extend(self, output: Any) -> None:
        """Take new tokens from a vLLM CompletionOutput; with logprobs=0 its flat list holds the sampled tokens only."""
        ids = list(output.token_ids)
        if output.logprobs is None or list(output.logprobs.token_ids) != ids:
            raise EngineError(
                f"vLLM returned tokens {ids[:8]} without their log-probabilities; its version is not known"
            )
        self.ids += ids
        self.logprobs += output.logprobs.logprobs
        self.reason = output.finish_reason

    def sampled(self, stops: StopStrings | None) -> Sampled:
        length = stops.length(self.ids) if stops else None
        if length is not None:
            return Sampled(self.ids[:length], self.logprobs[:length], "stop")
        if self.reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a response with the reason {self.reason!r}; expected 'stop' or 'length'")
        return Sampled(self.ids, self.logprobs, self.reason)


class StopStrings:
    """Finds the token that completes the first stop string."""

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer) -> None:
        self._stop = tuple(stop)
        self._decode = tokenizer.decode
        # a token gives a byte or more, but for special tokens; a miss costs time only, `length` looks at the whole
        self._window = max(len(s.encode()) for s in stop) + 8

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether the response may end here: the last tokens hold a stop string, and so does the whole."""
        return self._inside(ids[-self._window :]) and self._inside(ids)

    def length(self, ids: Sequence[int]) -> int | None:
        """Tokens up to and with the one that completes the earliest stop string; None without one."""
        if not self._inside(ids):
            return None
        return 1 + bisect_left(range(1, len(ids) + 1), True, key=lambda n: self._inside(ids[:n]))

    def _inside(self, ids: Sequence[int]) -> bool:
        text = self._decode(ids)
        return any(s in text for s in self._stop)


def check_options(options: SamplingOptions) -> None:
    """ConfigError for what vLLM would change silently or refuse less clearly."""
    t = options.temperature
    if not (t == 0 or MIN_TEMPERATURE <= t <= MAX_TEMPERATURE):
        raise ConfigError(
            f"vLLM samples at temperature 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}; found {t}; use "
            "sampler='transformers' for others"
        )
    if not 0 < options.top_p <= 1 or options.top_k < 0:
        raise ConfigError(
            f"top_p is above 0 and at most 1, top_k 0 (off) or more; found top_p={options.top_p}, top_k={options.top_k}"
        )
    if "" in options.stop:
        raise ConfigError("a stop string is empty; every response would end at once")


# --------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Weights:
    """What a full set of weights is."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter, by its Hugging Face name; tied ones once."""
    aliases: Mapping[str, str]
    """Second names of tied parameters (`lm_head.weight`) to the first."""
    constants: Mapping[str, torch.Tensor]
    """Buffers that a checkpoint holds; they do not train, so an update may leave them out."""

    @classmethod
    def of(cls, module: Any) -> Weights:
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        every = dict(module.named_parameters(remove_duplicate=False))
        saved = module.state_dict()
        return cls(
            shapes={name: tuple(every[name].shape) for name in first.values()},
            aliases={name: first[id(p)] for name, p in every.items() if first[id(p)] != name},
            constants={name: saved[name].clone() for name, _ in module.named_buffers() if name in saved},
        )

    def current(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The pairs of a module."""
        for name, parameter in module.named_parameters():
            yield name, parameter.detach()

    def checked(self, named: Iterable[tuple[str, Any]]) -> list[tuple[str, torch.Tensor]]:
        """The pairs, checked to be complete, known and of the right shape; tied names once, constants filled in."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in named:
            if name not in self.shapes and name not in self.aliases and name not in self.constants:
                raise EngineError(f"load() was given the unknown weight '{name}'; {nearest(name, self.shapes)}")
            if name in found:
                raise EngineError(f"load() was given the weight '{name}' twice; each must come once")
            known = self.constants[name].shape if name in self.constants else self.shapes[self.aliases.get(name, name)]
            if tuple(tensor.shape) != tuple(known):
                raise EngineError(
                    f"load() needs '{name}' with shape {tuple(known)}; found {tuple(tensor.shape)}; send the full tensor"
                )
            found[name] = tensor.detach()
        missing = [name for name in self.shapes if name not in found]
        if missing:
            raise EngineError(
                f"load() needs all {len(self.shapes)} weights; {len(missing)} did not come: {', '.join(missing[:5])}"
                f"{', ...' if len(missing) > 5 else ''}; send the whole model"
            )
        for alias, name in self.aliases.items():
            tied = found.pop(alias, None)
            if tied is not None and tied.data_ptr() != found[name].data_ptr() and not torch.equal(tied, found[name]):
                raise EngineError(
                    f"'{alias}' is tied to '{name}' in this model; load() was given two different tensors"
                )
        return list({**self.constants, **found}.items())


def overwrite(worker: Any, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Run by vLLM's worker: put every weight where vLLM keeps it, fused, packed and cast as its layers need."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.get_model()
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(iter(pairs))
        finally:
            # also after a failure: it takes the parameters off the meta device, so that the next load starts clean
            finalize_layerwise_reload(model, worker.model_config)
        repack_shared(model)
    left = [] if loaded is None else sorted({name for name, _ in model.named_parameters()} - set(loaded))
    left = [name for name in left if not shares_weight(model, name)]
    if left:
        raise EngineError(
            f"vLLM's {type(model).__name__} has weights that no name of the trainer's module fills: "
            f"{', '.join(left[:5])}{', ...' if len(left) > 5 else ''}; use sampler='transformers' for this model"
        )


def release_cache(worker: Any) -> None:
    """Run by vLLM's worker before it shuts down: give back the memory of the keys and values, by far the largest part.
    Something inside vLLM keeps a reference to these tensors, so dropping ours is not enough."""
    if worker.device.type != "cpu":
        torch.accelerator.synchronize()
    for cache in getattr(worker.model_runner, "kv_caches", ()):
        for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
            tensor.untyped_storage().resize_(0)


def repack_shared(model: torch.nn.Module) -> None:
    """Let layers that use another layer's weight see the new values.

    On a CPU vLLM multiplies with a packed copy. A reload packs a layer anew when its weight is loaded, and the weight of
    a tied head never is: it would keep the copy made when the engine started.
    """
    seen: set[int] = set()
    for module in model.modules():
        method, weight = getattr(module, "quant_method", None), getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.device.type != "cpu" or not weight.numel():
            continue
        if weight.data_ptr() in seen and method is not None:
            method.process_weights_after_loading(module)
        seen.add(weight.data_ptr())


def shares_weight(model: torch.nn.Module, name: str) -> bool:
    """Whether another parameter of the model has the same storage."""
    storage = model.get_parameter(name).data_ptr()
    return sum(p.data_ptr() == storage for _, p in model.named_parameters(remove_duplicate=False)) > 1


def module_logprobs(
    module: Any, prompt_ids: Sequence[int], response_ids: Sequence[int], phantoms: Sequence[int]
) -> list[float]:
    """[T] nats of each response token under the Transformers module at temperature 1, phantom ids left out."""
    training = module.training
    device = next(module.parameters()).device
    ids_T = torch.tensor([[*prompt_ids, *response_ids]], device=device)
    module.eval()
    try:
        with torch.no_grad():
            logits_TV = module(input_ids=ids_T, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    finally:
        module.train(training)
    logits_TV[:, list(phantoms)] = -math.inf
    logprobs_TV = logits_TV.log_softmax(-1)
    values: list[float] = logprobs_TV.gather(1, ids_T[0, len(prompt_ids) :, None])[:, 0].tolist()
    return values


# --------------------------------------------------------------------------------------------------------- opening


def import_vllm() -> Any:
    """vLLM, with `ENVIRONMENT` set before. Errors: MissingExtra; EngineError when it cannot run in this process."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra(
            "the vLLM sampler needs vllm; install it with pip install 'flowrl[vllm]' (GPU) or 'flowrl[cpu]' (CPU), or use "
            "sampler='transformers'"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise EngineError(
            "the vLLM sampler runs inside this process and overwrites the weights there; found the environment variable "
            f"VLLM_ENABLE_V1_MULTIPROCESSING={os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']}; unset it or set it to 0"
        )
    try:
        with global_state_kept():
            import vllm
            from vllm.platforms import current_platform

            if current_platform.is_cpu():
                # ranks of log-probabilities, which nobody reads, go through torch.compile; its default backend needs a
                # C++ compiler and takes seconds for each new shape
                type(current_platform).simple_compile_backend = "eager"
            import vllm.entrypoints.llm
    except ImportError as error:
        raise MissingExtra(
            f"vllm is installed but cannot be imported ({error}); reinstall it for this torch: pip install "
            "'flowrl[vllm]' (GPU) or 'flowrl[cpu]' (CPU)"
        ) from error
    return vllm


def export_config(module: Any, folder: str) -> None:
    """Write the config as vLLM reads it: with the name of the class, which a module built by hand leaves out."""
    config = copy.deepcopy(module.config)
    if not getattr(config, "architectures", None):
        config.architectures = [type(module).__name__]
    # the module's weights are plain numbers, however they were stored (a GGUF file says it is quantised)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)


def groups_of(team: Team) -> OwnGroups:
    """The process groups of this process's engines. Errors: EngineError when those that are open have another team."""
    from vllm.platforms import current_platform

    if not _groups:
        _groups.append(OwnGroups(team, current_platform.dist_backend))
    (found,) = _groups
    if not found.team.is_like(team):
        raise EngineError(
            f"vLLM has one set of process groups in a process: an engine on {found.team.size} ranks is open here, so one on "
            f"{team.size} cannot be; give the models that vLLM samples from on these ranks one layout"
        )
    return found


def forget_groups() -> None:
    """Destroy the process groups, when no sampler is open that uses them."""
    if _groups and not _open:
        _groups.pop().close()


def engine_options(config: Any, model: Model, vllm: Any, team: Team) -> dict[str, Any]:
    """Arguments of `vllm.LLM` besides the path. Errors: ConfigError for an option that is unknown or not the user's."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    known = [f.name for f in dataclasses.fields(EngineArgs)]
    given = dict(model.sampler_options)
    for name in given:
        if name in OWNED:
            raise ConfigError(f"sampler_options must not set '{name}': {OWNED[name]}")
        if name not in known:
            raise ConfigError(f"vLLM {vllm.__version__} has no option '{name}'; {nearest(name, known)}")
    if model.device and model.device.partition(":")[2] not in ("", str(team.device)):
        own = f"GPU {team.device}" if team.device else "the first visible GPU"
        raise ConfigError(
            f"the vLLM sampler uses {own}; found Model(device={model.device!r}); set CUDA_VISIBLE_DEVICES"
        )
    limits = [n for n in (given.pop("max_model_len", None), model.max_context) if n is not None]
    context = min(limits) if limits else None
    options: dict[str, Any] = {}
    if current_platform.is_cpu():
        if model.device and model.device.startswith("cuda"):
            raise ConfigError(
                f"the vLLM installed here is built for CPUs; found Model(device={model.device!r}); install flowrl[vllm]"
            )
        options["enforce_eager"] = True
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            options["kv_cache_memory_bytes"] = cpu_cache_bytes(
                config.get_text_config(), context, DTYPES[model.precision]
            )
    else:
        options["gpu_memory_utilization"] = GPU_SHARE
    options |= given
    if team.size > 1 or team.device:  # else vLLM's own way for one device
        options |= {"tensor_parallel_size": team.size, "distributed_executor_backend": executor_of(team)}
    return options | {
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # load() follows, the same way as after every update
        "dtype": DTYPES[model.precision],
        "max_model_len": context,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "seed": 0,
    }


def cpu_cache_bytes(config: Any, context: int | None, dtype: str) -> int:
    """Bytes for keys and values: 64 full contexts, at most 1 GiB, at least one context. vLLM's own default is most of
    the memory of the machine."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    context = context or getattr(config, "max_position_embeddings", None) or 4096
    blocks = -(-context // 128) + 1  # vLLM's CPU blocks hold 128 tokens
    one = 2 * config.num_hidden_layers * heads * width * (4 if dtype == "float32" else 2) * blocks * 128
    return max(int(one), min(64 * int(one), 1024 * MIB))


INHERITED = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LOCAL_WORLD_SIZE")
"""Environment variables that vLLM sets for processes of its own, and that would change every other child process."""


def let_numba_be_looked_at() -> None:
    """Where numba is loaded already (the tables' kernels load it), vLLM 0.32 for CPUs cannot be opened without this.

    It looks into every object of every module, `vars(value).get("kernel")`, and llvmlite has one that takes `__dict__` for
    the name of a function of LLVM's. That object keeps the names it has looked up, so an empty `__dict__` among them is what it
    gives.
    """
    found = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    names = getattr(found, "_fntab", None)
    if isinstance(names, dict) and not isinstance(names.get("__dict__"), dict):
        names["__dict__"] = {}


@contextmanager
def global_state_kept() -> Iterator[None]:
    """Undo what vLLM does to the process when it is imported and opened: it reseeds every generator, turns
    `torch.set_num_threads` into a function that does nothing, and sets the variables of `INHERITED`."""
    environment, set_num_threads = {name: os.environ.get(name) for name in INHERITED}, torch.set_num_threads
    python, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        torch.set_num_threads = set_num_threads
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def process_groups_kept(keep: bool) -> Iterator[None]:
    """While an engine shuts down, keep vLLM's process groups if other engines of the process still use them."""
    from vllm.v1.engine import core

    if not keep or not hasattr(core, "cleanup_dist_env_and_memory"):
        yield
        return
    cleanup = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = lambda *_, **__: None
    try:
        yield
    finally:
        core.cleanup_dist_env_and_memory = cleanup
