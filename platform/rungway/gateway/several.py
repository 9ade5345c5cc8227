"""Several prompts in one completion request: each is a request of its own, with its own decision, limits, ledger row and cache
entry; one answer holds the choices of all, in the order of the prompts. Evaluation harnesses send such batches.

All are submitted at once, so that a limit that refuses one is known before the others have cost much; the first that fails ends
the rest, and is the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rungway.clock import NS_PER_S
from rungway.contracts import GatewaySpec
from rungway.errors import RequestError
from rungway.gateway.answer import Facts, escape, json_headers, response_id, rungway_object, usage_object
from rungway.gateway.call import Call
from rungway.gateway.schema import HARMLESS, CompletionBody, bad
from rungway.outcomes import Code

_log = logging.getLogger(__name__)

Serve = Callable[[Call], Awaitable[None]]
_CACHED = ("hit-exact", "miss", "off")  # what an answer says of parts that differ: never more than holds for all


@dataclass(slots=True, frozen=True)
class Several:
    """The bodies that the client could have sent one by one; how long it may take to read their answer."""

    bodies: list[bytes]
    read_s: float


def several(body: CompletionBody, raw: bytes, headers: dict[bytes, bytes], spec: GatewaySpec) -> Several | None:
    """None for one prompt. Raises RequestError naming what a request with several cannot have."""
    given = body.prompt
    if isinstance(given, str) or len(given) < 2 or all(isinstance(one, int) for one in given):
        return None
    if len({type(one) for one in given}) > 1:
        raise bad("prompt", "'prompt' takes texts or lists of token ids, not both")
    if len(given) > spec.completion_prompts_max:
        raise bad("prompt", f"'prompt' takes at most {spec.completion_prompts_max} prompts, not {len(given)}")
    for index, one in enumerate(given):
        if not one:
            raise bad(f"prompt[{index}]", "'prompt' must not be empty")
    if body.stream:
        raise bad("stream", "'stream' takes one prompt, not several")
    if b"idempotency-key" in headers:
        raise bad("idempotency-key", "an Idempotency-Key takes one prompt, not several")
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    for name in ("prompt", *HARMLESS):
        fields.pop(name, None)
    if len(given) * sum(len(bytes(value)) for value in fields.values()) > spec.body_bytes_max:
        raise bad("prompt", "the fields beside 'prompt' are too long for so many prompts")
    return Several([msgspec.json.encode(fields | {"prompt": one}) for one in given], spec.request_timeout_s)


class Part:
    """One prompt as a call of its own, whose client is the outer call: it reads its body, and `gone` once it is to end."""

    __slots__ = ("_body", "_read", "answer", "call", "gone", "status")

    def __init__(self, outer: Call, body: bytes) -> None:
        scope = {**outer.scope, "headers": [pair for pair in outer.scope["headers"] if pair[0] != b"content-length"]}
        self.call = Call(outer.gateway, outer.endpoint, scope, self._receive, self._send)
        self.call.received_ns = outer.received_ns  # deadlines count from when all of them came
        self.gone = asyncio.Event()
        self.status = 0  # none yet
        self.answer = b""
        self._body = body
        self._read = False

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._read:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        self._read = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.answer += message["body"]


async def serve_each(call: Call, asked: Several, serve: Serve) -> None:
    """Writes one answer for all, or the error of the first that failed; nothing when the client has left."""
    parts = [Part(call, body) for body in asked.bodies]
    failed: list[int] = []  # in the order of time: what follows the first is its doing

    def end(_: object = None) -> None:
        for part in parts:
            part.gone.set()

    async def run(index: int) -> None:
        try:
            await serve(parts[index].call)
        finally:
            if parts[index].status != 200:
                failed.append(index)
                end()

    watch = asyncio.create_task(call.left())
    watch.add_done_callback(end)
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(len(parts)):
                if failed or watch.done():
                    break
                group.create_task(run(index))
                await asyncio.sleep(0)  # streams of others go on between two of them
        if watch.done():
            return
    finally:
        watch.cancel()
    if failed:
        part = parts[failed[0]]
        call.facts = replace(part.call.facts, request_id=call.id)
        await call.refuse(_error(part, failed[0]))
        return
    call.facts = _together(call.facts, [part.call.facts for part in parts])
    whole = await asyncio.to_thread(_body, call, parts)
    try:
        async with asyncio.timeout(asked.read_s):
            await call.respond(200, json_headers(call.facts, len(whole)), whole)
    except TimeoutError:
        _log.warning("%s: the client did not read its answer and was cut off", call.id)


def _error(part: Part, index: int) -> RequestError:
    """What this part was told, under the number of its prompt."""
    if not part.status:
        return RequestError(Code.INTERNAL, "an internal error; the request id helps to find it")
    error = msgspec.json.decode(part.answer)["error"]
    param = f"prompt[{index}]" if error["param"] == "prompt" else error["param"]
    return RequestError(Code(error["code"]), error["message"], param=param, retry_after_s=part.call.facts.retry_after_s)


def _together(facts: Facts, parts: Sequence[Facts]) -> Facts:
    """What holds for the whole answer: all that served, the deepest rung and its reason, everything that was made worse."""
    degraded = dict.fromkeys(name for one in parts for name in one.degraded.split(",") if name != "none")
    worst = max(parts, key=lambda one: one.rung or 0)
    return replace(
        facts,
        model=parts[0].model,
        served=",".join(dict.fromkeys(one.served for one in parts if one.served is not None)),
        rung=worst.rung,
        degraded=",".join(degraded) or "none",
        reason=worst.reason,
        cache=max((one.cache for one in parts), key=_CACHED.index),
        rate=parts[-1].rate,
    )


def _body(call: Call, parts: Sequence[Part]) -> bytes:
    choices: list[str] = []
    prompt_tokens = cached_tokens = output_tokens = 0
    for part in parts:
        shape = msgspec.json.decode(part.answer)
        for choice in shape["choices"]:
            choices.append(json.dumps(choice | {"index": len(choices)}, separators=(",", ":")))
        usage = shape["usage"]
        prompt_tokens += usage["prompt_tokens"]
        cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        output_tokens += usage["completion_tokens"]
    each = ",".join([rungway_object(part.call.facts) for part in parts])
    return (
        f'{{"id":"{response_id(call.id, False)}","object":"text_completion","created":{call.received_wall_ns // NS_PER_S},'
        f'"model":{escape(call.facts.model or "")},"choices":[{",".join(choices)}],'
        f'"usage":{usage_object(prompt_tokens, cached_tokens, output_tokens)},'
        f'"rungway":{rungway_object(call.facts)[:-1]},"prompts":[{each}]}}}}'
    ).encode("ascii")
