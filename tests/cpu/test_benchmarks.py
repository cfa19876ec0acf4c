"""The benchmarks compare equal work: no time is measured here."""

import pytest

from benchmarks import overhead
from benchmarks.task import Settings, fast_tokenizer
from examples.tiny import CharTokenizer

SMALL = Settings(hidden_size=32, num_layers=1, num_heads=2, prompts=4, group_size=4, threads=1, warmup_steps=2)


def test_the_hugging_face_tokenizer_gives_the_ids_of_the_characters():
    characters, fast = CharTokenizer(), fast_tokenizer()
    for text in ("", "7", "048230=", characters.alphabet):
        assert fast(text)["input_ids"] == characters.encode(text, bos=True)
    assert fast.decode([3, 4, 12, characters.eos_id], skip_special_tokens=True) == characters.decode([3, 4, 12])
    assert (fast.pad_token_id, fast.bos_token_id, fast.eos_token_id) == (0, 1, 2)


def test_every_way_takes_every_step():
    times = overhead.measure(SMALL, steps=3)
    assert {name: len(seconds) for name, seconds in times.items()} == dict.fromkeys(overhead.WAYS, 3)


def test_a_loop_that_does_other_work_is_refused(monkeypatch):
    step = overhead.SameEngine.step

    def wrong(self, number, rows):
        step(self, number, rows)
        self.rewards[-1] += 0.5

    monkeypatch.setattr(overhead.SameEngine, "step", wrong)
    with pytest.raises(SystemExit, match="other rewards at step 0"):
        overhead.measure(SMALL, steps=1)
