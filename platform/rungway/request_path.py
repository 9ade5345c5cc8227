"""The life of one request, in order. Every step is a file of its own in gateway/."""

from __future__ import annotations

import asyncio

from rungway.errors import RequestError
from rungway.gateway.call import Call, ClientGone
from rungway.gateway.embeddings import read_embedding
from rungway.gateway.read import read
from rungway.gateway.recall import recall
from rungway.gateway.serving import Serving
from rungway.gateway.several import Several, serve_each


async def serve_request(call: Call) -> None:
    """One inference request: identify -> read -> recall -> submit -> stream -> settle.

    Writes exactly one HTTP answer unless the client has left, and settles exactly once on every path, also when the
    server cancels it.
    """
    gateway = call.gateway
    serving = Serving(call)
    try:
        catalogue = gateway.known()
        # identify: the tenant comes from the key alone
        caller = call.identify(catalogue)
        caller.require("inference")
        # read: OpenAI JSON -> Ask, with exact token counts for every tier that may serve it
        reading = await (read_embedding if call.endpoint == "embeddings" else read)(call, caller, catalogue)
        if isinstance(reading, Several):
            # several prompts: each goes this way by itself
            await serve_each(call, reading, serve_request)
            return
        # recall: the idempotency join, then the tenant's own exact cache
        memory = serving.remember(recall(gateway, reading, catalogue))
        if memory.replay is not None:
            await serving.replay(reading, memory.replay)
            return
        # submit: one decision, with its reasons, by the controller
        grant = await serving.submit(reading, catalogue)
        # stream: attempts on replicas, deltas to the client
        if grant.offer.kind == "model":
            await serving.stream(grant)
        else:
            await serving.canned(grant, catalogue)
    except RequestError as error:
        await serving.fail(error)
    except ClientGone:
        serving.left()
    except asyncio.CancelledError:
        serving.left()
        raise
    finally:
        # settle: whatever happened, the controller learns how it ended
        serving.settle()
