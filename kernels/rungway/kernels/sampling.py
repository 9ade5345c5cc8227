"""Temperature, top-k, top-p, min-p and the draw in two launches over the logits, without sorting the vocabulary.

First, every chunk of a row gives its maximum and sums of exponentials. Then one program a row picks. Greedy rows take the
maximum. Unfiltered rows find the chunk in which the running sum passes the uniform number, and read only that one again.
Filtered rows first list the few tokens above a bound that surely holds all that are kept, then search by value, digit by
digit of the float's ordered bits: the k-th largest, the end of top-p and the drawn token are all "where does the running
count or sum over falling logits pass a target". Tokens of equal logits count in order of their ids.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
SIZE = 1024  # entries looked at in one step of a search
CANDIDATES = 4096  # listed per row; where more have to be considered, the whole row is searched
BOUNDS = tl.constexpr(16)  # candidate bounds tried: 1 .. 16 below the maximum, in units of temperature
DIGIT = tl.constexpr(4)  # bits settled by one pass of the search
WAYS = tl.constexpr(16)


@triton.jit
def _stats(
    logits_ptr: tl.tensor,
    raw_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    first_ptr: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    HAS_RAW: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """stats[row, chunk] = (maximum, sum of exp((x - max) / temperature), maximum of raw, sum of exp(raw - max raw))."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    known = token < vocabulary
    x = tl.load(logits_ptr + row * vocabulary + token, mask=known, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    pivot = tl.where(top > float("-inf"), top, 0.0)
    heat = tl.load(temperature_ptr + row)
    mass = tl.sum(tl.exp((x - pivot) / tl.where(heat > 0.0, heat, 1.0)), axis=0)
    into = stats_ptr + (row * chunks + chunk) * 4
    tl.store(into, top)
    tl.store(into + 1, mass)
    tl.store(first_ptr + row * chunks + chunk, tl.min(tl.where(x == top, token, vocabulary), axis=0))
    if HAS_RAW:
        x = tl.load(raw_ptr + row * vocabulary + token, mask=known, other=float("-inf")).to(tl.float32)
        top = tl.max(x, axis=0)
        pivot = tl.where(top > float("-inf"), top, 0.0)
    tl.store(into + 2, top)
    tl.store(into + 3, tl.sum(tl.exp(x - pivot), axis=0))


@triton.jit
def _entry(logits_ptr, ids_ptr, start, count, listed, top, heat, min_p, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(weights, ordered integers of the logits, ids) of SIZE entries from `start`: of the list, or of the whole row. Entries
    that do not exist or fall to min-p have weight -1."""
    place = start + tl.arange(0, SIZE)
    known = place < count
    ids = tl.where(listed > 0, tl.load(ids_ptr + place, mask=known & (place * 0 + listed > 0), other=0), place)
    x = tl.load(logits_ptr + ids, mask=known, other=float("-inf")).to(tl.float32)
    weight = tl.exp((x - top) / heat)
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return tl.where(known & (weight >= min_p), weight, -1.0), order, ids


@triton.jit
def _search(logits_ptr, ids_ptr, count, listed, top, heat, min_p, target, BY_COUNT: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """(d, sum above d): with the sum over logits > d at most `target` and over logits >= d more than that; d as in `_entry`.
    A sum is of weights, or just counts."""
    low = tl.full([], 0, tl.int64)  # d is in low .. low + 2^left - 1
    above = tl.full([], 0.0, tl.float64)
    for level in range(32 // DIGIT):
        step = tl.full([], 1, tl.int64) << (32 - DIGIT - level * DIGIT)
        bound = low + (tl.arange(0, WAYS) + 1).to(tl.int64) * step
        sums = tl.zeros([WAYS], tl.float64)
        for start in range(0, count, SIZE):
            weight, order, _ids = _entry(logits_ptr, ids_ptr, start, count, listed, top, heat, min_p, SIZE)
            counted = tl.where(weight >= 0.0, 1.0, 0.0) if BY_COUNT else tl.maximum(weight, 0.0)
            over = order[:, None] >= bound[None, :]
            sums += tl.sum(tl.where(over, counted[:, None], 0.0), axis=0).to(tl.float64)
        digit = tl.sum((sums > target).to(tl.int32), axis=0)
        above = tl.sum(tl.where(tl.arange(0, WAYS) == digit, sums, 0.0), axis=0)
        low += digit.to(tl.int64) * step
    return low, above


@triton.jit
def _around(logits_ptr, ids_ptr, count, listed, top, heat, min_p, key, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(weight above `key`, weight of one entry at `key`, number of entries at `key`, all entries)."""
    above = tl.full([], 0.0, tl.float64)
    one = tl.full([], 0.0, tl.float32)
    equal = tl.full([], 0, tl.int32)
    entries = tl.full([], 0, tl.int32)
    for start in range(0, count, SIZE):
        weight, order, _ids = _entry(logits_ptr, ids_ptr, start, count, listed, top, heat, min_p, SIZE)
        counted = tl.maximum(weight, 0.0)
        here = (order == key) & (weight >= 0.0)
        above += tl.sum(tl.where(order > key, counted, 0.0), axis=0).to(tl.float64)
        one = tl.maximum(one, tl.max(tl.where(here, weight, 0.0), axis=0))
        equal += tl.sum(here.to(tl.int32), axis=0)
        entries += tl.sum((weight >= 0.0).to(tl.int32), axis=0)
    return above, one.to(tl.float64), equal, entries


@triton.jit
def _list(logits_ptr, ids_ptr, vocabulary, top, heat, mass, top_k, top_p, min_p, SIZE: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """(entries, listed, weight): writes the ids of a set that holds every token that may be kept, in order. listed = 0: the
    set is the whole row, as no bound is known to suffice or too many tokens are above it. The weight is that of all tokens
    of the row that min-p leaves."""
    below = (tl.arange(0, BOUNDS) + 1).to(tl.float32)
    many = tl.zeros([BOUNDS], tl.int32)
    sums = tl.zeros([BOUNDS], tl.float64)
    left = tl.full([], 0.0, tl.float64)
    for start in range(0, vocabulary, SIZE):
        token = start + tl.arange(0, SIZE)
        x = tl.load(logits_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        over = x[:, None] >= (top - below * heat)[None, :]
        weight = tl.exp((x - top) / heat)
        many += tl.sum(over.to(tl.int32), axis=0)
        sums += tl.sum(tl.where(over, weight[:, None], 0.0), axis=0).to(tl.float64)
        left += tl.sum(tl.where(weight >= min_p, weight, 0.0), axis=0).to(tl.float64)
    # top-k or, without it, top-p bounds the set, and so does min-p alone; with margins for rounding
    few = (many * 0 + top_k > 0) & (many >= top_k)
    enough = few | ((many * 0 + top_k == 0) & (sums >= top_p * mass * 1.00001)) | (tl.exp(0.5 - below) < min_p)
    at = tl.min(tl.where(enough & (many <= ROOM), tl.arange(0, BOUNDS), BOUNDS), axis=0)
    listed = (at < BOUNDS).to(tl.int32)
    count = tl.full([], 0, tl.int32)
    bound = top - (at + 1).to(tl.float32) * heat
    for start in range(0, vocabulary * listed, SIZE):
        token = start + tl.arange(0, SIZE)
        x = tl.load(logits_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        over = (x >= bound).to(tl.int32)
        tl.store(ids_ptr + count + tl.cumsum(over, axis=0) - 1, token, mask=over > 0)
        count += tl.sum(over, axis=0)
    return tl.where(listed > 0, count, vocabulary), listed, left


@triton.jit
def _whole(x, most):  # type: ignore[no-untyped-def]
    """The integer part of `x` in 0 .. `most`; 0 for what is no number."""
    inside = tl.where(x > 0.0, tl.minimum(x, most.to(tl.float64)), 0.0)
    return tl.floor(inside).to(tl.int64)


@triton.jit
def _filtered(logits_ptr, ids_ptr, vocabulary, top, heat, mass, top_k, top_p, min_p, point, SIZE: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """The token at `point` (0 .. 1) of the running sum over the kept tokens, largest first."""
    count, listed, kept = _list(logits_ptr, ids_ptr, vocabulary, top, heat, mass, top_k, top_p, min_p, SIZE, ROOM)
    tl.debug_barrier()  # what one thread has listed, others read
    cut = tl.full([], 0, tl.int64)  # the last kept logit, and how many that have it are kept
    spare = tl.full([], 2147483647, tl.int64)
    _above, _one, _equal, entries = _around(logits_ptr, ids_ptr, count, listed, top, heat, min_p, cut, SIZE)
    if top_k > 0 and top_k <= entries:
        cut, higher = _search(logits_ptr, ids_ptr, count, listed, top, heat, min_p, top_k - 0.5, True, SIZE)
        above, one, _equal, _entries = _around(logits_ptr, ids_ptr, count, listed, top, heat, min_p, cut, SIZE)
        spare = top_k.to(tl.int64) - higher.to(tl.int64)
        kept = above + spare.to(tl.float64) * one
    if top_p < 1.0:
        target = top_p * kept
        key, above = _search(logits_ptr, ids_ptr, count, listed, top, heat, min_p, target, False, SIZE)
        _above, one, equal, _entries = _around(logits_ptr, ids_ptr, count, listed, top, heat, min_p, key, SIZE)
        if key >= cut and equal > 0:
            most = tl.where(key == cut, spare, equal.to(tl.int64))
            spare = tl.maximum(_whole(tl.ceil((target - above) / one), most), 1)
            cut = key
            kept = above + spare.to(tl.float64) * one
    target = tl.minimum(point, 1.0 - 1e-6) * kept  # sums that differ in their last bits must not lead past the end
    key, above = _search(logits_ptr, ids_ptr, count, listed, top, heat, min_p, target, False, SIZE)
    key = tl.maximum(key, cut)
    above, one, equal, _entries = _around(logits_ptr, ids_ptr, count, listed, top, heat, min_p, key, SIZE)
    last = tl.where(key == cut, tl.minimum(spare, equal.to(tl.int64)), equal.to(tl.int64)) - 1
    rank = _whole((target - above) / one, last)
    seen = tl.full([], 0, tl.int64)
    token = tl.full([], 0, tl.int64)
    for start in range(0, count, SIZE):
        weight, order, ids = _entry(logits_ptr, ids_ptr, start, count, listed, top, heat, min_p, SIZE)
        here = ((order == key) & (weight >= 0.0)).to(tl.int64)
        chosen = (here > 0) & (seen + tl.cumsum(here, axis=0) - 1 == rank)
        token += tl.sum(tl.where(chosen, ids.to(tl.int64), 0), axis=0)
        seen += tl.sum(here, axis=0)
    return token


@triton.jit
def _pick(
    logits_ptr: tl.tensor,
    raw_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    first_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    token_ptr: tl.tensor,
    logprob_ptr: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    at = stats_ptr + (row * chunks + chunk) * 4
    tops = tl.load(at, mask=there, other=float("-inf"))
    top = tl.max(tops, axis=0)
    firsts = tl.load(first_ptr + row * chunks + chunk, mask=there, other=vocabulary)
    token = tl.min(tl.where(tops == top, firsts, vocabulary), axis=0).to(tl.int64)
    heat = tl.load(temperature_ptr + row)
    if heat >= 1e-5 and top > float("-inf"):
        point = tl.load(uniform_ptr + row)
        masses = tl.load(at + 1, mask=there, other=0.0).to(tl.float64) * tl.exp((tops - top) / heat)
        mass = tl.sum(masses, axis=0)
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        if top_k > 0 or top_p < 1.0 or min_p > 0.0:
            room = ids_ptr + row * ROOM
            token = _filtered(logits_ptr, room, vocabulary, top, heat, mass, top_k, top_p, min_p, point, SIZE, ROOM)
        else:
            target = point * mass
            passed = (tl.cumsum(masses, axis=0) <= target) & there
            which = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), chunks - 1)
            before = tl.sum(tl.where(chunk < which, masses, 0.0), axis=0)
            ids = which * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits_ptr + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
            weight = tl.exp((x - top) / heat)
            running = before + tl.cumsum(weight.to(tl.float64), axis=0)
            found = which * CHUNK + tl.sum((running <= target).to(tl.int32), axis=0)
            token = tl.minimum(found, tl.max(tl.where(weight > 0.0, ids, 0), axis=0)).to(tl.int64)
    token = tl.minimum(token, vocabulary - 1)
    tops = tl.load(at + 2, mask=there, other=float("-inf"))
    top = tl.max(tops, axis=0)
    pivot = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(tl.load(at + 3, mask=there, other=0.0) * tl.exp(tops - pivot), axis=0)
    chosen = tl.load(raw_ptr + row * vocabulary + token).to(tl.float32)
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, chosen - pivot - tl.log(tl.where(total == 0.0, 1.0, total)))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    raw: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See sampling_reference.sample. Everything contiguous."""
    rows, vocabulary = logits.shape
    assert all(part.is_contiguous() for part in (logits, temperature, top_k, top_p, min_p, uniform))
    assert raw is None or (raw.is_contiguous() and raw.shape == logits.shape)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    logprobs = logits.new_empty(rows, dtype=torch.float32)
    if rows == 0:
        return tokens, logprobs
    chunks = triton.cdiv(vocabulary, CHUNK)
    stats = logits.new_empty((rows, chunks, 4), dtype=torch.float32)
    first = logits.new_empty((rows, chunks), dtype=torch.int32)
    listed = logits.new_empty((rows, CANDIDATES), dtype=torch.int32)
    known = logits if raw is None else raw
    _stats[(rows, chunks)](
        logits,
        known,
        temperature,
        stats,
        first,
        vocabulary,
        chunks,
        HAS_RAW=raw is not None,
        CHUNK=CHUNK,
        enable_fp_fusion=True,
        num_warps=8,
    )
    _pick[(rows,)](
        logits, known, temperature, top_k, top_p, min_p, uniform, stats, first, listed, tokens, logprobs, vocabulary,
        chunks, CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(chunks), SIZE=SIZE, ROOM=CANDIDATES, enable_fp_fusion=True, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs
