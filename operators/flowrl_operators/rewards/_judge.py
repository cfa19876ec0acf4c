"""A reward from a model behind an OpenAI-compatible server."""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import flowrl as fr
from flowrl.errors import ConfigError, DataError, EngineError
from flowrl_operators.rewards._extract import last_match

TEMPLATE = """\
Judge the response to a question.

Question:
{prompt}

Reference answer:
{answer}

Response:
{response}

Compare the response with the reference answer. End with a line "Score: " and a number from 0 (wrong) to 10 (right).
"""
"""What the judge is asked unless told otherwise; `{prompt}`, `{answer}` and `{response}` are filled in."""

SCORE = r"(?i:score)\s*\**\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
"""Pattern of the judge's number; the last match counts."""

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_REPLY_BYTES = 4 << 20


PATIENCE_S = 20.0
"""Seconds beyond `timeout_s` for which a reply may go on and on."""


def _row_limit(*, timeout_s: float = 60.0, retries: int = 3, **_: object) -> float:
    return (timeout_s + 30.0) * (retries + 1) + 10.0


@fr.reward(timeout_s=_row_limit, threads=lambda *, concurrency=8, **_: concurrency)
def judge(
    response: str,
    prompt: fr.PROMPT.str = None,
    answer: fr.PROMPT.str = None,
    *,
    model: str,
    url: str,
    template: str = TEMPLATE,
    pattern: str = SCORE,
    low: float = 0.0,
    high: float = 10.0,
    key: str | None = "OPENAI_API_KEY",
    temperature: float = 0.0,
    max_tokens: int = 1024,
    timeout_s: float = 60.0,
    retries: int = 3,
    wait_s: float = 1.0,
    concurrency: int = 8,
    extra: Mapping[str, Any] | None = None,
) -> float:
    """LLM judge: the score a language model gives a response, brought from [low, high] to [0, 1].

    Asks `url`/chat/completions of any server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, hosted ones). Rows are asked
    side by side. A row whose judge does not answer, or answers without a score, gets NaN and the reason in `row_error`.

    A policy learns to write for its judge: keep a rule beside it, and read samples. Text of a response that looks like a
    placeholder stays as it is.

    Args:
        model: name of the model at the server.
        url: the server's base, e.g. `http://localhost:8000/v1`.
        template: the question, with `{prompt}`, `{answer}`, `{response}` where they go.
        pattern: the number in the judge's reply: first group of the last match.
        low, high: ends of the judge's scale; numbers beyond them are errors, not rewards.
        key: name of the environment variable that holds the key, read when the request is made: a key never stands in a graph,
            a run or a message. Unset or None sends none.
        temperature, max_tokens: of the judge.
        timeout_s: seconds one request may take between bytes, and about as many until its end.
        retries: more attempts after a lost connection, a timeout, or status 408, 409, 425, 429 and 5xx.
        wait_s: seconds before the first retry; doubled each time, with jitter, or the server's `Retry-After`; at most 30.
        concurrency: requests under way at once.
        extra: more fields of the request, e.g. `{"top_p": 0.9}`.

    Errors: ConfigError for a scale or an address that makes no sense; EngineError when the server does not answer; DataError when
    the reply holds no score.
    """
    if not -math.inf < low < high < math.inf:
        raise ConfigError(f"the scale of rewards.judge needs low < high, both finite; found {low} and {high}")
    if retries < 0 or concurrency < 1 or not 0 < timeout_s < math.inf or not 0 <= wait_s < math.inf:
        raise ConfigError(
            "rewards.judge needs retries >= 0, concurrency >= 1, timeout_s > 0 and wait_s >= 0; found "
            f"retries={retries}, concurrency={concurrency}, timeout_s={timeout_s}, wait_s={wait_s}"
        )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url of rewards.judge starts with http:// or https://; found {url!r}")
    known = {"prompt": str(prompt or ""), "answer": str(answer or ""), "response": str(response)}
    question = re.sub(r"\{(prompt|answer|response)\}", lambda match: known[match[1]], template)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": temperature,
        "max_tokens": max_tokens,
        **dict(extra or {}),
    }
    reply = _asked(f"{url.rstrip('/')}/chat/completions", body, key, timeout_s, retries, wait_s)
    found = last_match(pattern, reply)
    try:
        score = float(found) if found is not None else None
    except ValueError:
        score = None
    if score is None:
        raise DataError(f"the judge's reply holds no score ({pattern}); it ends in {reply[-200:]!r}")
    if not low <= score <= high:
        raise DataError(f"the judge's score {score:g} is not between {low:g} and {high:g}")
    return (score - low) / (high - low)


def _asked(url: str, body: Mapping[str, Any], key: str | None, timeout_s: float, retries: int, wait_s: float) -> str:
    """The text of the judge's reply."""
    headers = {"Content-Type": "application/json"}
    secret = os.environ.get(key) if key else None
    if secret:
        headers["Authorization"] = f"Bearer {secret}"
    data = json.dumps(body).encode()
    why = ""
    for attempt in range(retries + 1):
        asked_wait = None
        try:
            request = urllib.request.Request(url, data, headers)
            with urllib.request.urlopen(request, timeout=timeout_s) as found:
                text = _read(found, MAX_REPLY_BYTES + 1, time.monotonic() + timeout_s + PATIENCE_S)
                whole = found.headers.get("Content-Length") or ""
            if whole.isdigit() and len(text) < min(int(whole), MAX_REPLY_BYTES):
                raise http.client.IncompleteRead(text, int(whole) - len(text))
            return _content(text)
        except urllib.error.HTTPError as error:
            with error:
                why = f"status {error.code}: {error.read1(500).decode('utf-8', 'replace')}"
                asked_wait = error.headers.get("Retry-After")
            if error.code not in RETRIED:
                break
        except (OSError, http.client.HTTPException) as error:  # URLError, timeouts, lost connections, half a reply
            why = f"{type(error).__name__}: {getattr(error, 'reason', None) or error}"
        if attempt < retries:
            time.sleep(_pause(attempt, wait_s, asked_wait))
    # a server may quote what it was sent
    why = why.replace(secret, "<key>") if secret else why
    raise EngineError(f"the judge at {url} did not answer after {attempt + 1} attempts; the last: {why}")


def _read(reply: Any, most: int, deadline: float) -> bytes:
    """What a server says, at most `most` bytes; one that never comes to its end is given up at the deadline."""
    text = bytearray()
    while len(text) < most and (part := reply.read1(min(most - len(text), 1 << 16))):
        text += part
        if time.monotonic() > deadline:
            raise TimeoutError(f"the reply did not come to its end; {len(text)} bytes came")
    return bytes(text)


def _pause(attempt: int, wait_s: float, asked: str | None) -> float:
    try:
        wait = float(asked) if asked is not None else wait_s * 2**attempt * random.uniform(0.75, 1.25)
    except ValueError:  # a date
        wait = wait_s * 2**attempt
    wait = wait_s if math.isnan(wait) else wait
    return min(max(wait, 0.0), 30.0)


def _content(text: bytes) -> str:
    if len(text) > MAX_REPLY_BYTES:
        raise DataError(f"the judge's reply is longer than {MAX_REPLY_BYTES} bytes")
    try:
        content = json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        shown = text[:200].decode("utf-8", "replace")
        raise DataError(f"the judge's reply is no chat completion ({type(error).__name__}): {shown!r}") from error
    if not isinstance(content, str):
        raise DataError(
            f"the judge's reply has {type(content).__name__} for text; a reasoning model may need more max_tokens"
        )
    return content
