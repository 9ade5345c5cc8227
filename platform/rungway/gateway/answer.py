"""The shapes of answers: headers that every answer carries, whole bodies, errors. No I/O.

All text leaves as ASCII JSON (`escape`), so no client that splits lines at U+2028 and the like can break a frame.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii

from rungway.engine.protocol import PromptToken, TokenLogprob
from rungway.errors import RequestError
from rungway.gateway.prompt_view import prompt_logprobs
from rungway.gateway.tool_calls import call_id, finish_of, read_calls
from rungway.outcomes import CODES, Code
from rungway.types import Grant, RateInfo, Refusal

_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_NO_CACHE = (b"cache-control", b"no-cache")
LOGPROB_MIN = -9999.0
escape = encode_basestring_ascii
Header = tuple[bytes, bytes]


@dataclass(slots=True)
class Facts:
    """What is known by now about an answer; its headers and its `rungway` object come from here. `served` is
    `tier/version` (or `cache`, `template`), `degraded` a comma list of rung names or `none`, `allow` the methods of a path
    that was asked with another one."""

    request_id: str
    model: str | None = None
    served: str | None = None
    rung: int | None = None
    degraded: str = "none"
    reason: str = ""
    cache: str = "off"
    rate: RateInfo | None = None
    retry_after_s: int | None = None
    replayed: bool = False
    allow: str = ""

    def granted(self, grant: Grant) -> None:
        offer = grant.offer
        self.served = f"{offer.tier}/{offer.version}" if offer.version else offer.tier or offer.kind.value
        self.rung = offer.rung
        self.degraded = ",".join(offer.degraded) or "none"
        self.reason = grant.reason
        self.rate = grant.rate

    def refused(self, refusal: Refusal) -> None:
        self.rung = refusal.rung
        self.reason = refusal.reason or refusal.code
        self.rate = refusal.rate


@dataclass(slots=True, frozen=True)
class Choice:
    """One sequence as the client gets it; `logprobs` None when they were not asked for."""

    text: str
    finish: str
    logprobs: list[TokenLogprob] | None


@dataclass(slots=True, frozen=True)
class Stored:
    """A whole answer, kept for an idempotent or a cached repeat. Token counts are of the run that made it. `prompt`: with its
    log-probabilities, where they are listed."""

    request_id: str
    created: int
    facts: Facts
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prompt: list[PromptToken] | None = None

    @property
    def size(self) -> int:
        """Characters of text and, by a rough weight, of logprobs with their alternatives."""
        lists = [self.prompt or (), *(choice.logprobs or () for choice in self.choices)]
        listed = sum(1 + len(token.top) for tokens in lists for token in tokens)
        return 64 * listed + sum(len(choice.text) for choice in self.choices)


def headers(facts: Facts, first: Header) -> list[Header]:
    """Every header that is known; `first` is the content type."""
    known = [first, (b"x-request-id", facts.request_id.encode()), (b"x-rungway-cache", facts.cache.encode())]
    if facts.model is not None:
        known.append((b"x-rungway-model-requested", _safe(facts.model)))
    if facts.served is not None:
        known.append((b"x-rungway-model-served", _safe(facts.served)))
    if facts.rung is not None:
        known.append((b"x-rungway-rung", b"%d" % facts.rung))
        known.append((b"x-rungway-degraded", _safe(facts.degraded)))
        known.append((b"x-rungway-reason", _safe(facts.reason)))
    if facts.rate is not None:
        _add_rate(known, facts.rate)
    if facts.retry_after_s is not None:
        known.append((b"retry-after", b"%d" % max(1, facts.retry_after_s)))
    if facts.allow:
        known.append((b"allow", facts.allow.encode()))
    if facts.replayed:
        known.append((b"x-rungway-idempotent-replay", b"true"))
    return known


def json_headers(facts: Facts, length: int, error: RequestError | None = None) -> list[Header]:
    known = headers(facts, _JSON)
    known.append((b"content-length", b"%d" % length))
    paused = error is not None and error.code is Code.TENANT_SUSPENDED and error.retry_after_s is not None
    if error is not None and CODES[error.code].type == "insufficient_quota" and not paused:
        # The official SDKs retry every 429 unless told otherwise; a spent budget stays spent. A pause ends by itself.
        known.append((b"x-should-retry", b"false"))
    return known


def sse_headers(facts: Facts) -> list[Header]:
    known = headers(facts, _SSE)
    known.append(_NO_CACHE)
    return known


def _add_rate(known: list[Header], rate: RateInfo) -> None:
    if rate.limit_requests is not None:
        known.append((b"x-ratelimit-limit-requests", b"%d" % rate.limit_requests))
        known.append((b"x-ratelimit-remaining-requests", b"%d" % max(0, rate.remaining_requests or 0)))
        known.append((b"x-ratelimit-reset-requests", b"%ds" % max(0, math.ceil(rate.reset_requests_s))))
    if rate.limit_tokens is not None:
        known.append((b"x-ratelimit-limit-tokens", b"%d" % rate.limit_tokens))
        known.append((b"x-ratelimit-remaining-tokens", b"%d" % max(0, rate.remaining_tokens or 0)))
        known.append((b"x-ratelimit-reset-tokens", b"%ds" % max(0, math.ceil(rate.reset_tokens_s))))


def _safe(text: str) -> bytes:
    """Configured text may be any Unicode; a header may not."""
    if text.isascii() and text.isprintable():
        return text.encode()
    return text.encode("unicode_escape")


def rungway_object(facts: Facts) -> str:
    """The `rungway` member of a body or a first chunk: the same values as the headers'."""
    model = "null" if facts.model is None else escape(facts.model)
    served = "null" if facts.served is None else escape(facts.served)
    return (
        f'{{"request_id":"{facts.request_id}","model_requested":{model},"model_served":{served},'
        f'"rung":{facts.rung or 0},"degraded":{escape(facts.degraded)},"reason":{escape(facts.reason)},'
        f'"cache":"{facts.cache}"}}'
    )


def usage_object(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> str:
    return (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{output_tokens},'
        f'"total_tokens":{prompt_tokens + output_tokens},'
        f'"prompt_tokens_details":{{"cached_tokens":{cached_tokens}}}}}'
    )


def response_id(request_id: str, chat: bool) -> str:
    return ("chatcmpl-" if chat else "cmpl-") + request_id.removeprefix("req_")


def body(facts: Facts, stored: Stored, chat: bool, calling: bool = False, listed: int | None = None) -> bytes:
    """A whole OpenAI answer: `chat.completion` or `text_completion`. `calling`: the texts may hold tool calls. `listed`:
    alternatives in `prompt_logprobs`, which chats have once and completions in every choice."""
    prompt = "" if listed is None or stored.prompt is None else prompt_member(stored.prompt, listed)
    if calling:
        choices = ",".join([_calling_choice(facts.request_id, i, one) for i, one in enumerate(stored.choices)])
    elif chat:
        choices = ",".join([_chat_choice(i, one) for i, one in enumerate(stored.choices)])
    else:
        choices = ",".join([_text_choice(i, one, prompt) for i, one in enumerate(stored.choices)])
    kind = "chat.completion" if chat else "text_completion"
    usage = usage_object(stored.prompt_tokens, stored.cached_tokens, stored.output_tokens)
    return (
        f'{{"id":"{response_id(facts.request_id, chat)}","object":"{kind}","created":{stored.created},'
        f'"model":{escape(facts.model or "")},"choices":[{choices}],"usage":{usage}{prompt if chat else ""},'
        f'"rungway":{rungway_object(facts)}}}'
    ).encode("ascii")


def prompt_member(tokens: list[PromptToken], tops: int) -> str:
    """The member of an object behind others."""
    return f',"prompt_logprobs":{prompt_logprobs(tokens, tops)}'


def _chat_choice(index: int, choice: Choice) -> str:
    logprobs = "null" if choice.logprobs is None else chat_logprobs(choice.logprobs)
    return (
        f'{{"index":{index},"message":{{"role":"assistant","content":{escape(choice.text)},"refusal":null}},'
        f'"logprobs":{logprobs},"finish_reason":"{choice.finish}"}}'
    )


def _calling_choice(request_id: str, index: int, choice: Choice) -> str:
    content, calls, cut = read_calls(choice.text)
    if not calls:
        return _chat_choice(index, choice)
    listed = [
        {
            "id": call_id(request_id, index, at),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for at, call in enumerate(calls)
    ]
    logprobs = "null" if choice.logprobs is None else chat_logprobs(choice.logprobs)
    return (
        f'{{"index":{index},"message":{{"role":"assistant","content":{escape(content) if content else "null"},"refusal":null,'
        f'"tool_calls":{json.dumps(listed, separators=(",", ":"))}}},'
        f'"logprobs":{logprobs},"finish_reason":"{finish_of(choice.finish, len(calls), cut)}"}}'
    )


def _text_choice(index: int, choice: Choice, prompt: str) -> str:
    logprobs = "null" if choice.logprobs is None else text_logprobs(choice.logprobs, 0)
    return f'{{"index":{index},"text":{escape(choice.text)},"logprobs":{logprobs},"finish_reason":"{choice.finish}"{prompt}}}'


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> str:
    """The chat shape: one object per token. Minus infinity, which JSON cannot say, becomes `LOGPROB_MIN`."""

    def entry(text: str, data: bytes, logprob: float | None) -> dict[str, object]:
        return {"token": text, "logprob": _shown(logprob), "bytes": list(data)}

    # Token by token: one call for all of a long answer would hold the interpreter, and so every stream, for seconds.
    content = ",".join(
        [
            json.dumps(
                entry(one.token, one.data, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]},
                separators=(",", ":"),
            )
            for one in tokens
        ]
    )
    return f'{{"content":[{content}],"refusal":null}}'


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> str:
    """The completions shape: parallel lists. `offset` = characters of text before the first token. Of an echoed prompt the
    first token has null, for nothing precedes it."""
    offsets: list[int] = []
    for one in tokens:
        offsets.append(offset)
        offset += chars(one.data)
    shape = {
        "tokens": [_named(one.token, one.data) for one in tokens],
        "token_logprobs": [_shown(one.logprob) for one in tokens],
        "top_logprobs": [
            None
            if one.logprob is None
            else {_named(text, data): max(value, LOGPROB_MIN) for text, data, value in one.top}
            for one in tokens
        ],
        "text_offset": offsets,
    }
    return json.dumps(shape, separators=(",", ":"))


def chars(data: bytes) -> int:
    """Characters that begin in these bytes of UTF-8; tokens may cut characters."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def _named(text: str, data: bytes) -> str:
    """A token as a key. Pieces of characters, which all read alike, are told apart by their bytes, as OpenAI does."""
    if "\ufffd" not in text or text.encode("utf-8", "replace") == data:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _shown(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOGPROB_MIN)


def error_body(error: RequestError) -> bytes:
    return json.dumps(error.body(), separators=(",", ":")).encode("ascii")
