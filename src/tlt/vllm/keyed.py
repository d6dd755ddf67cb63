"""Keyed sampling: a sample's seed and a token's position determine the noise that draws it.

A token is drawn as `argmax(log p + g)`, where g is Gumbel noise: that is a draw from p. Here g is
no stream of random numbers but a function of (seed, position, token), computed when it is needed by
a counter-based generator (Philox 4x32-10, Salmon et al. 2011). So the noise of a position is fixed
before anything is drafted, and a draft token is accepted if it equals the token drawn. The tokens
of a sample do not depend on drafts, on the batch, or on the engine.

Noise for every token of a vocabulary would take longer than the draw needs. So tokens are taken in
blocks of 64: first the block is drawn by its sum of probabilities, with separate noise, then the
token within the block. The result is distributed as p.

The sums of a row are taken in the same order for any number of rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

BLOCK = 64
"""Tokens per block. `_fold` adds exactly this many numbers."""

_BLOCKS, _TOKENS = 0, 1
"""Purposes of noise: the third word of the generator's counter."""

NOTHING, RAW, AT_TEMPERATURE = range(3)
"""Distributions whose log-probabilities `draw_rows` writes."""

_LOWEST = np.float32(-87.0)
"""Below this, the exponential is no longer a normal number of 32 bits, and counts as 0."""
_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number
_C2, _C3, _C4 = (
    np.float32(5.0000001201e-1),
    np.float32(1.6666665459e-1),
    np.float32(4.1665795894e-2),
)
_C5, _C6, _C7 = (
    np.float32(8.3334519073e-3),
    np.float32(1.3981999507e-3),
    np.float32(1.9875691500e-4),
)
_ZERO, _ONE = np.float32(0), np.float32(1)
_EXPONENT, _ONE_BITS = np.int32(23), np.int32(0x3F800000)
_SLACK = 1.0 + 1e-9  # more than rounding


def compiled(function: Any) -> Any:
    """Compile a function, and cache the machine code next to the source if that folder is writable.

    A product and a sum may become one instruction. Everything else is computed as written, so that
    a row's result depends on the row alone.
    """
    options = {"fastmath": {"contract"}, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache
        return njit(**options)(function)


# --- noise --------------------------------------------------------------------------------------


@compiled
def philox(counter: Any, key: Any) -> tuple[Any, Any]:
    """Return 128 random bits for a counter of four 32-bit words and a key of 64 bits."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1 = np.uint64(counter[0]) & mask, np.uint64(counter[1]) & mask
    c2, c3 = np.uint64(counter[2]) & mask, np.uint64(counter[3]) & mask
    k0, k1 = np.uint64(key) & mask, np.uint64(key) >> half
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * c0
        product1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ k0,
            product1 & mask,
            (product0 >> half) ^ c3 ^ k1,
            product0 & mask,
        )
        k0 = (k0 + np.uint64(0x9E3779B9)) & mask
        k1 = (k1 + np.uint64(0xBB67AE85)) & mask
    return (c0 << half) | c1, (c2 << half) | c3


@compiled
def _uniform(bits: int) -> float:
    """Return a number between 0 and 1, both excluded, for 64 random bits."""
    return (float(np.uint64(bits) >> np.uint64(12)) + 0.5) * 2.0**-52


@compiled
def exponential(bits: int) -> float:
    """Return an exponentially distributed number above 0 for 64 random bits.

    Minus its logarithm is Gumbel noise, so dividing a probability by it adds that noise.
    """
    return -math.log(_uniform(bits))


@compiled
def _noise(key: int, position: int, purpose: int, index: int) -> float:
    """Return the noise of one block or token."""
    even, odd = philox((index >> 1, position, purpose, 0), key)
    return exponential(odd if index & 1 else even)


# --- weights ------------------------------------------------------------------------------------


@compiled
def _exp(z: Any) -> Any:
    """Return the exponential of a number from `_LOWEST` to 0, to 2 units in the last place.

    Plain arithmetic lets the compiler compute 8 or 16 values in one instruction.
    """
    shifted = z * _LOG2_E + _ROUND
    power = shifted - _ROUND
    rest = z - power * _LN2_HIGH - power * _LN2_LOW
    value = _C7
    value = value * rest + _C6
    value = value * rest + _C5
    value = value * rest + _C4
    value = value * rest + _C3
    value = value * rest + _C2
    value = value * rest * rest + rest + _ONE
    rounded: Any = np.float32(shifted).view(np.int32)
    bits = np.int32(np.int32(rounded << _EXPONENT) + _ONE_BITS)
    return value * bits.view(np.float32)


@compiled
def _weight(x: Any, top: Any, inverse: Any) -> Any:
    """Return the weight of a logit: its exponential relative to the row's largest one."""
    z = (x - top) * inverse
    value = _exp(z if z > _LOWEST else _LOWEST)
    return value if z > _LOWEST else _ZERO


@compiled
def _fold(w: Any) -> Any:
    """Return the sum of a block; `w` is overwritten."""
    for i in range(32):
        w[i] += w[32 + i]
    for i in range(16):
        w[i] += w[16 + i]
    for i in range(8):
        w[i] += w[8 + i]
    return ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7]))


@compiled
def _largest(row: Any, lanes: Any) -> Any:
    lanes[:] = -np.inf
    whole = len(row) // BLOCK
    for block in range(whole):
        part = row[block * BLOCK : (block + 1) * BLOCK]
        for i in range(BLOCK):
            lanes[i] = part[i] if part[i] > lanes[i] else lanes[i]
    top = lanes[0]
    for i in range(BLOCK):
        top = lanes[i] if lanes[i] > top else top
    for index in range(whole * BLOCK, len(row)):
        top = row[index] if row[index] > top else top
    return top


@compiled
def _add_up(row: Any, top: Any, inverse: Any, lanes: Any, sums: Any) -> float:
    """Write the sum of weights of every block, and return their total."""
    whole = len(row) // BLOCK
    total = 0.0
    for block in range(whole):
        part = row[block * BLOCK : (block + 1) * BLOCK]
        for i in range(BLOCK):
            lanes[i] = _weight(part[i], top, inverse)
        sums[block] = _fold(lanes)
        total += sums[block]
    if whole < len(sums):
        lanes[:] = _ZERO
        for index in range(whole * BLOCK, len(row)):
            lanes[index - whole * BLOCK] = _weight(row[index], top, inverse)
        sums[whole] = _fold(lanes)
        total += sums[whole]
    return total


# --- draws --------------------------------------------------------------------------------------


@compiled
def _draw_block(sums: Any, key: int, position: int) -> int:
    """Return the block that the noise selects; -1 if none has any weight."""
    chosen, best = -1, 0.0
    for pair in range((len(sums) + 1) // 2):
        even, odd = philox((pair, position, _BLOCKS, 0), key)
        for block, bits in ((2 * pair, even), (2 * pair + 1, odd)):
            # The noise is at least 1 - uniform, so most blocks are out without a logarithm.
            if block < len(sums) and sums[block] * _SLACK > best * (1.0 - _uniform(bits)):
                score = sums[block] / exponential(bits)
                if score > best:
                    chosen, best = block, score
    return chosen


@compiled
def _draw_token(row: Any, top: Any, inverse: Any, block: int, key: int, position: int) -> int:
    """Return the token of a block that the noise selects."""
    chosen, best = block * BLOCK, -1.0
    for token in range(block * BLOCK, min(len(row), (block + 1) * BLOCK)):
        weight = _weight(row[token], top, inverse)
        if weight > 0:
            score = weight / _noise(key, position, _TOKENS, token)
            if score > best:
                chosen, best = token, score
    return chosen


@compiled
def _first_of(row: Any, value: Any) -> int:
    for index in range(len(row)):
        if row[index] == value:
            return index
    return 0


@compiled
def _rank(row: Any, value: Any) -> int:
    rank: Any = np.int32(0)
    for index in range(len(row)):
        rank += np.int32(row[index] >= value)
    return int(rank)


@compiled
def draw_rows(
    logits: Any,
    num_drafts: Any,
    drafts: Any,
    keys: Any,
    positions: Any,
    inverse: Any,
    logprobs_of: int,
    tokens: Any,
    logprobs: Any,
    ranks: Any,
) -> None:
    """Draw the tokens of a batch, and write them with their log-probabilities and ranks.

    Args:
        logits: [R, V], what tokens are drawn from: for each request its drafts' rows and one more.
        num_drafts: [B].
        drafts: [N], the drafts of all requests one after the other.
        keys: [B], the seeds of the samples.
        positions: [B], the place of each request's first row in its response.
        inverse: [B], 1 / temperature; 0 takes the largest logit.
        logprobs_of: `NOTHING`, or the distribution whose log-probabilities to write: the raw
            logits, or the logits at the request's temperature.
        tokens: [B, K+1], where a request's tokens go; the rest is not written.
        logprobs: [B, K+1].
        ranks: [B, K+1].
    """
    lanes: Any = np.empty(BLOCK, np.float32)
    sums: Any = np.empty((logits.shape[1] + BLOCK - 1) // BLOCK, np.float32)
    first = offset = 0
    for request in range(len(num_drafts)):
        key, scale = keys[request], inverse[request]
        for place in range(num_drafts[request] + 1):
            row = logits[first + place]
            position = positions[request] + place
            top, total, block = _largest(row, lanes), 0.0, -1
            if scale > 0:
                total = _add_up(row, top, scale, lanes, sums)
                block = _draw_block(sums, key, position)
            if block >= 0:
                token = _draw_token(row, top, scale, block, key, position)
            else:
                token = _first_of(row, top)
            tokens[request, place] = token
            if logprobs_of != NOTHING:
                if scale == 0 or (logprobs_of == RAW and scale != _ONE):
                    scale_of = _ONE
                    total = _add_up(row, top, scale_of, lanes, sums)
                else:
                    scale_of = scale
                logprobs[request, place] = (row[token] - top) * scale_of - math.log(total)
                ranks[request, place] = _rank(row, row[token])
            if place < num_drafts[request] and drafts[offset + place] != token:
                break
        first += num_drafts[request] + 1
        offset += num_drafts[request]


@compiled
def draw_drafts(
    logits: Any, token_ids: Any, keys: Any, positions: Any, inverse: Any, num_blocks: int
) -> Any:
    """Return a draft token per row [B]: what the policy would draw if it had the drafter's logits.

    Args:
        logits: [B, D], over the drafter's vocabulary.
        token_ids: [D], the policy's token of each of the drafter's.
        keys: [B].
        positions: [B].
        inverse: [B], 1 / temperature; 0 takes the largest logit.
        num_blocks: blocks of the policy's vocabulary.
    """
    lanes: Any = np.empty(BLOCK, np.float32)
    weights: Any = np.empty(logits.shape[1], np.float32)
    sums: Any = np.empty(num_blocks, np.float32)
    tokens: Any = np.empty(len(logits), np.int64)
    for request in range(len(logits)):
        row, key, position = logits[request], keys[request], positions[request]
        top = _largest(row, lanes)
        scale = inverse[request]
        if scale == 0:
            tokens[request] = token_ids[_first_of(row, top)]
            continue
        for index in range(len(row)):
            weights[index] = _weight(row[index], top, scale)
        sums[:] = _ZERO
        for index in range(len(row)):
            sums[token_ids[index] // BLOCK] += weights[index]
        block = _draw_block(sums, key, position)
        chosen, best = token_ids[0], -1.0
        for index in range(len(row)):
            if token_ids[index] // BLOCK == block and weights[index] > 0:
                score = weights[index] / _noise(key, position, _TOKENS, token_ids[index])
                if score > best:
                    chosen, best = token_ids[index], score
        tokens[request] = chosen
    return tokens


@compiled
def shortfall(row: Any, key: int, position: int, inverse: Any, token: int) -> float:
    """Return by how much a token's log-probability misses the draw; 0 for the token drawn.

    Two engines whose logits differ by rounding draw different tokens only where this is about as
    small as the rounding.
    """
    lanes: Any = np.empty(BLOCK, np.float32)
    sums: Any = np.empty((len(row) + BLOCK - 1) // BLOCK, np.float32)
    top = _largest(row, lanes)
    if inverse == 0:
        return float(top - row[token])
    _add_up(row, top, inverse, lanes, sums)
    drawn, own = _draw_block(sums, key, position), token // BLOCK
    weight = _weight(row[token], top, inverse)
    if drawn < 0 or weight == 0:
        return math.inf
    rival = _draw_token(row, top, inverse, own, key, position)
    missed = math.log(_weight(row[rival], top, inverse) / weight) + math.log(
        _noise(key, position, _TOKENS, token) / _noise(key, position, _TOKENS, rival)
    )
    if drawn != own:
        missed += math.log(sums[drawn] / sums[own]) + math.log(
            _noise(key, position, _BLOCKS, own) / _noise(key, position, _BLOCKS, drawn)
        )
    return missed
