"""An engine that says what it is told turn by turn, and a tokenizer whose tokens merge."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer as Backend, decoders, models
from transformers import PreTrainedTokenizerFast

import flowrl as fr
from flowrl.engines import ENGINES
from flowrl.engines.null import NullHost
from flowrl.engines.protocol import Sampled, SampleRequest, SamplingOptions
from flowrl.engines.tokenizers import HuggingFaceTokenizer


class TurnEngine:
    """Opens `Model([ids of turn 0, ids of turn 1, ...])` and keeps the prompt of every request."""

    name = "turns"
    asked: ClassVar[list[list[int]]] = []

    def open(self, name: str, model: fr.Model, uses: frozenset[str], *, seed: int) -> "TurnHost":
        return TurnHost(name, model, seed=seed)


class TurnHost(NullHost):
    """See `TurnEngine`."""

    def generate(self, requests: Sequence[SampleRequest], options: SamplingOptions) -> list[Sampled]:
        found = []
        for request in requests:
            TurnEngine.asked.append(list(request.prompt_ids))
            ids = list(self.spec.source[request.key.turn])[: request.max_tokens]
            found.append(Sampled(ids, [-1.0] * len(ids), "stop"))
        return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Prompts that the engine `turns` was given, in order."""
    monkeypatch.setitem(ENGINES, "turns", "tests.cpu.environments.conftest:TurnEngine")
    monkeypatch.setattr(TurnEngine, "asked", [])
    yield TurnEngine.asked


@pytest.fixture(scope="session")
def merging() -> Any:
    """Every printable letter is a token, and `he` + `llo` also stand for `hello`: text that goes there and back changes ids."""
    letters = ["<e>", *sorted({chr(n) for n in range(32, 127)} | {"\n"})]
    vocab = {token: i for i, token in enumerate([*letters, "he", "ll", "llo", "hello"])}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    backend = Backend(models.BPE(vocab, merges))
    backend.decoder = decoders.Fuse()  # no spaces between tokens
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>"))
