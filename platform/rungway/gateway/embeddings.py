"""POST /v1/embeddings: from its body to an Ask, and from vectors to its answer.

Vectors travel and are kept as base64 of little-endian float32, which is the API's own `encoding_format: base64`; numbers are
written out only where the client wants them.
"""

from __future__ import annotations

import base64
import sys
from array import array

import msgspec

from rungway.contracts import TierKind
from rungway.engine.protocol import Sampling
from rungway.gateway.answer import Facts, Stored, escape, rungway_object
from rungway.gateway.call import Call
from rungway.gateway.catalogue import Catalogue, Plan
from rungway.gateway.constrain import Demand
from rungway.gateway.directives import read_directives
from rungway.gateway.identify import Caller
from rungway.gateway.inputs import Given, Inputs, check_ids, measure_inputs
from rungway.gateway.prompts import Lexer
from rungway.gateway.read import Reading, ask_of, plan_of
from rungway.gateway.schema import EmbeddingBody, bad, decode_embedding
from rungway.policies.features import features

FORMATS = ("float", "base64")


async def read_embedding(call: Call, caller: Caller, catalogue: Catalogue) -> Reading:
    """Reads body and headers of `call`. Raises RequestError for everything that a client can do wrong, and ClientGone when
    it leaves before its body is here."""
    body = decode_embedding(await call.body(catalogue.gateway.body_bytes_max))
    plan = plan_of(caller.tenant, body.model, catalogue, TierKind.EMBEDDING)
    call.facts.model = plan.model
    directives = read_directives(call.headers, caller.tenant)
    if body.encoding_format is not None and body.encoding_format not in FORMATS:
        raise bad("encoding_format", f"'encoding_format' must be one of {', '.join(FORMATS)}")
    given = _given(body, catalogue.gateway.embedding_inputs_max)
    lexer = call.gateway.tokenizers.of_tier(catalogue, plan.tiers[0])[0]
    if body.dimensions is not None and body.dimensions != lexer.dimensions:
        raise bad("dimensions", f"the vectors of model '{plan.model}' have {lexer.dimensions} dimensions and no others")
    ids = [one for one in given if isinstance(one, list)]
    check_ids(ids, lexer)
    inputs = Inputs(given, _cut(body, plan, lexer, catalogue))
    lengths = await measure_inputs(inputs, plan, call.gateway.tokenizers, catalogue)
    ask = ask_of(call, caller, plan, directives, lengths, 0, features("", turns=1, max_tokens=0))
    ask = msgspec.structs.replace(ask, kind=TierKind.EMBEDDING)
    return Reading(
        body=body,
        ask=ask,
        plan=plan,
        prompt=inputs,
        sampling=Sampling(max_tokens=0),
        demand=Demand(),
        directives=directives,
        tenant=caller.tenant,
        chat=False,
        stream=False,
        include_usage=False,
    )


def _given(body: EmbeddingBody, inputs_max: int) -> Given:
    """One list of texts, or one of lists of ids, none of them empty."""
    given = body.input
    if isinstance(given, str):
        given = [given]
    if given and all(isinstance(one, int) for one in given):
        given = [[one for one in given if isinstance(one, int)]]
    if not given:
        raise bad("input", "'input' must not be empty")
    if len(given) > inputs_max:
        raise bad("input", f"'input' takes at most {inputs_max} texts, not {len(given)}")
    for index, one in enumerate(given):
        if not isinstance(one, int) and not one:
            raise bad(f"input[{index}]", "a text to embed must not be empty")
    texts = [one for one in given if isinstance(one, str)]
    ids = [one for one in given if isinstance(one, list)]
    if len(texts) == len(given):
        return texts
    if len(ids) == len(given):
        return ids
    raise bad("input", "'input' takes texts or lists of token ids, not both")


def _cut(body: EmbeddingBody, plan: Plan, lexer: Lexer, catalogue: Catalogue) -> int | None:
    """`truncate_prompt_tokens`; -1 = what the model takes."""
    asked = body.truncate_prompt_tokens
    if asked is None:
        return None
    most = catalogue.context_min[plan.tiers[0]]
    least = 1 + (lexer.sentences.around if lexer.sentences is not None else 0)
    if asked != -1 and not least <= asked <= most:
        raise bad("truncate_prompt_tokens", f"'truncate_prompt_tokens' must be -1 or between {least} and {most}")
    return most if asked == -1 else asked


def embeddings_body(facts: Facts, stored: Stored, encoding_format: str | None) -> bytes:
    """A whole answer: `list` of `embedding`, in the order of the inputs."""
    shown = _quoted if encoding_format == "base64" else _numbers
    data = ",".join(
        f'{{"object":"embedding","index":{index},"embedding":{shown(choice.text)}}}'
        for index, choice in enumerate(stored.choices)
    )
    usage = f'{{"prompt_tokens":{stored.prompt_tokens},"total_tokens":{stored.prompt_tokens}}}'
    return (
        f'{{"object":"list","data":[{data}],"model":{escape(facts.model or "")},"usage":{usage},'
        f'"rungway":{rungway_object(facts)}}}'
    ).encode("ascii")


def vector_text(vector: bytes) -> str:
    """How a vector is kept in a Choice."""
    return base64.b64encode(vector).decode("ascii")


def _quoted(text: str) -> str:
    return f'"{text}"'


def _numbers(text: str) -> str:
    values = array("f", base64.b64decode(text))
    if sys.byteorder == "big":
        values.byteswap()
    return msgspec.json.encode(values.tolist()).decode("ascii")
