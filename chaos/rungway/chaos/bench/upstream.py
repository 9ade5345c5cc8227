"""The upstream that other gateways are put in front of: OpenAI-shaped, no model, FastAPI on uvicorn in one process.

`python -m rungway.chaos.bench.upstream PORT`. The text is a function of the prompt: `max_tokens` words, one each
`TPOT_S`; with `max_tokens` 1 the answer comes at once. It is measured alone too: no gateway can be faster than it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

TPOT_S = 0.005
_SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")


def words(prompt: str, count: int) -> list[str]:
    """`count` different words (up to 4,900) that depend on the prompt."""
    start = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest(), "big")
    several = len(_SYLLABLES)
    numbers = [(start + 37 * at) % (several * several) for at in range(count)]
    return [_SYLLABLES[number // several] + _SYLLABLES[number % several] for number in numbers]


def create_app() -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> Response:
        return Response("ok")

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "bench"}]})

    async def chat(request: Request) -> Response:
        asked = json.loads(await request.body())
        count = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        said = words(str(asked["messages"][-1]["content"]), count)
        if asked.get("stream"):
            return StreamingResponse(_stream(said), media_type="text/event-stream")
        if count > 1:
            await asyncio.sleep(TPOT_S * count)
        return Response(_body(said), media_type="application/json")

    app.add_api_route("/v1/chat/completions", chat, methods=["POST"], response_model=None)
    return app


def _body(said: list[str]) -> bytes:
    answer = {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1,
        "model": "fake",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": " ".join(said)}, "finish_reason": "length"}
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": len(said), "total_tokens": 8 + len(said)},
    }
    return json.dumps(answer).encode()


async def _stream(said: list[str]) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    last = len(said) - 1
    base = 'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"fake","choices":[{"index":0,'
    for at, word in enumerate(said):
        due_s += TPOT_S
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        role = '"role":"assistant",' if at == 0 else ""
        gap = "" if at == 0 else " "
        finish = '"length"' if at == last else "null"
        yield f'{base}"delta":{{{role}"content":"{gap}{word}"}},"finish_reason":{finish}}}]}}\n\n'.encode()
    yield b"data: [DONE]\n\n"


def main() -> None:
    uvicorn.run(
        create_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False, loop="uvloop"
    )


if __name__ == "__main__":
    main()
