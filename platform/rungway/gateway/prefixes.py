"""The names under which engines may know the beginning of a prompt, for the controller's choice of a replica."""

from __future__ import annotations

from rungway.engine.chain import chain_keys, word_ids
from rungway.gateway.catalogue import Catalogue, Plan
from rungway.gateway.prompts import Prompt, Tokenizers


def prefix_keys(
    prompt: Prompt, plan: Plan, tokenizers: Tokenizers, catalogue: Catalogue, tenant: str
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Per candidate tier the keys of the prompt's leading blocks, at most `gateway.prefix_keys_max`, and the tokens from
    key to key; tiers without any are left out. Where a tier's versions cut or tokenize differently, the keys are those of
    its first version."""
    limit = catalogue.gateway.prefix_keys_max
    found: dict[str, tuple[int, ...]] = {}
    steps: dict[str, int] = {}
    made: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for tier in plan.candidates if limit else ():
        version = catalogue.tiers[tier].versions[0]
        lexer = tokenizers.get(version)
        if lexer is None:
            continue
        block_tokens = version.cache_block_tokens
        every = version.prefix_key_blocks
        how = (id(lexer), block_tokens, every)
        if how not in made:
            whole = prompt.whole(lexer)
            # one token more than the blocks hold: the last one of a prompt is never found
            tokens = whole.ids or word_ids(whole.text, limit * every * block_tokens + 1)
            made[how] = chain_keys(tenant, tokens, block_tokens, limit, every)
        if made[how]:
            found[tier], steps[tier] = made[how], every * block_tokens
    return found, steps
