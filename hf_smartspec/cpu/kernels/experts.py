"""Mixtures of experts: the choice of each token's experts, their products, and the sum of their outputs."""

import numpy as np

from ...jit import inner
from ...jit.pointers import ahead, float32_at, get, int64_at, like, put, rounded, take
from .columns import multiply_columns
from .gates import exponential
from .multiply import MULTIPLY_FIELDS, NEXT, NUM_TOKENS, OUTPUTS, TOKENS, multiply

# Compiled code is called with the address of these numbers, int64 each but for `eps`, `factor`, `scale`, `cap` and
#   `least`, which are float64.
# scores: address of `[num_tokens, num_experts]`, of the kind. The softmax of these times `scale`, or if `is_sigmoid`
#   the sigmoids, are written to float32 `probabilities` of the same shape. The experts with the `num_chosen` largest
#   ones, plus `bias` (0, or the address of `[num_experts]`, float32 if `is_wide`), are written to int64 `choices`,
#   `[num_tokens, num_chosen]`, and their probabilities to float32 `weights`, divided if `norms` by their sum plus
#   `eps`, or by `least` if that is more; times `factor`, and times those in `own_factors` (0, or the address of
#   `[num_experts]`, of the kind).
# groups: 0, or the number of groups that the experts are divided into, of which the best `num_groups` are chosen first:
#   by the largest of their probabilities, bias included, or by the sum of the two largest ones if `adds_two`. ranks:
#   address of float32 `[num_tokens, 2 * groups]`, for these numbers, and for ones where groups are chosen.
# is_sparse: whether experts are those with the largest scores, and the weight of each is its part of the softmax of
#   those scores that are no more than `cap` below its own, relative to the larger size, and not chosen before it.
ROUTE_FIELDS = tuple(
    "next threads num_tokens num_experts num_chosen is_sigmoid norms scores bias is_wide probabilities choices weights "
    "own_factors groups num_groups adds_two ranks eps factor scale is_sparse cap least".split()
)
(
    _NEXT, _THREADS, _NUM_TOKENS, _NUM_EXPERTS, _NUM_CHOSEN, _IS_SIGMOID, _NORMS, _SCORES, _ROUTE_BIAS, _IS_WIDE,
    _PROBABILITIES, _CHOICES, _WEIGHTS, _OWN_FACTORS, _ROUTE_GROUPS, _NUM_GROUPS, _ADDS_TWO, _RANKS, _EPS, _FACTOR,
    _SCALE, _IS_SPARSE, _CAP, _LEAST,
) = range(24)  # fmt: skip
# choices: see above. Pairs of a token and an expert are ordered by experts, and then by tokens: `pairs`, an address of
#   int64 `[num_tokens * num_chosen]`, gets their tokens, and `places`, of `[num_tokens, num_chosen]`, where they are.
# first, second: addresses of `[num_experts, BLOCK_SIZE]` int64, the fields of two products of each expert, of which
#   those are set that depend on its tokens. Each has pairs at `tokens` and at `outputs`, so many bytes apart.
GROUP_FIELDS = tuple(
    "next threads num_tokens num_experts num_chosen choices pairs places first first_tokens first_outputs "
    "first_token_bytes first_output_bytes second second_tokens second_outputs second_token_bytes "
    "second_output_bytes".split()
)
_GROUP_CHOICES, _PAIRS, _PLACES, _FIRST = range(5, 9)
_SECOND = _FIRST + 5
# blocks: address of `[num_experts, BLOCK_SIZE]` int64, the fields of each expert's product; those without tokens rest.
# is_transposed: whether weights are `[num_inputs, num_outputs]`.
EXPERTS_FIELDS = tuple("next threads num_experts blocks is_transposed".split())
_OWN_EXPERTS, _BLOCKS, _IS_TRANSPOSED = 2, 3, 4
BLOCK_SIZE = len(MULTIPLY_FIELDS)
# x: address of `[num_tokens * num_chosen, size]`; places, weights: as above. outputs: of `[num_tokens, size]`, the sum
#   of each token's lines times their weights, in the order in which they were chosen, rounded once.
# shared: 0, or the address of `[num_tokens, size]`, which are added, times the sigmoids of `gates`, `[num_tokens]`,
#   unless that is 0.
# factor: float64, by which sums are multiplied before they are rounded.
COMBINE_FIELDS = tuple("next threads num_tokens size num_chosen x places weights shared gates outputs factor".split())
_SIZE, _COMBINE_CHOSEN, _X, _COMBINE_PLACES, _COMBINE_WEIGHTS, _SHARED, _GATES, _SUMS, _SUMS_FACTOR = range(3, 12)
_SHARE = 512  # numbers that a thread adds up at a time
_ZERO, _ONE, _UNLIKELY = np.float32(0), np.float32(1), np.float32(-np.inf)


@inner
def route(a, numbers, kind):
    """Choose the experts of the next token, until none is left. `numbers` are the fields as float64."""
    num, chosen, scale = a[_NUM_EXPERTS], a[_NUM_CHOSEN], np.float32(numbers[_SCALE])
    token = take(ahead(a, _NEXT))
    while token < a[_NUM_TOKENS]:
        scores = ahead(like(kind, a[_SCORES]), token * num)
        probabilities = ahead(float32_at(a[_PROBABILITIES]), token * num)
        if a[_IS_SPARSE]:
            for index in range(num):
                probabilities[index] = get(scores, index)
        elif a[_IS_SIGMOID]:
            for index in range(num):
                probabilities[index] = _ONE / (_ONE + exponential(-scale * get(scores, index)))
        else:
            _softmax(scores, probabilities, num, scale)
        choices = ahead(int64_at(a[_CHOICES]), token * chosen)
        weights = ahead(float32_at(a[_WEIGHTS]), token * chosen)
        ranks = ahead(float32_at(a[_RANKS]), token * 2 * a[_ROUTE_GROUPS])
        if a[_ROUTE_GROUPS]:
            _choose_groups(a, probabilities, ranks, kind)
        total = np.float32(numbers[_EPS])
        for place in range(chosen):
            best = _best(a, probabilities, ranks, choices, place, kind)
            choices[place], weights[place] = best, probabilities[best]
            if a[_IS_SPARSE]:
                weights[place] = _sparse_weight(scores, choices, place, num, np.float32(numbers[_CAP]))
            total += weights[place]
        if total < np.float32(numbers[_LEAST]):
            total = np.float32(numbers[_LEAST])
        for place in range(chosen):
            own = weights[place] / total if a[_NORMS] else weights[place]
            weights[place] = own * np.float32(numbers[_FACTOR])
            if a[_OWN_FACTORS]:
                weights[place] *= get(like(kind, a[_OWN_FACTORS]), choices[place])
        token = take(ahead(a, _NEXT))


@inner
def _softmax(scores, outputs, num, scale):
    highest, total = get(scores, 0), np.float32(0)
    for index in range(1, num):
        highest = max(highest, get(scores, index))
    for index in range(num):
        outputs[index] = exponential(scale * (get(scores, index) - highest))
    for index in range(num):
        total += outputs[index]
    for index in range(num):
        outputs[index] /= total


@inner
def _sparse_weight(scores, choices, place, num, cap):
    """Return the weight of the last of `place + 1` choices, rounded where transformers rounds what it compares."""
    highest, total = get(scores, choices[place]), np.float32(0)
    for expert in range(num):
        own = get(scores, expert)
        is_left = not rounded(scores, rounded(scores, highest - own) / max(abs(own), highest)) > rounded(scores, cap)
        for earlier in range(place):
            is_left = is_left and choices[earlier] != expert
        if is_left:
            total += exponential(own - highest)
    return _ONE / total


@inner
def _choose_groups(a, probabilities, ranks, kind):
    """Write the numbers by which a token's groups are chosen, and ones after them where they are chosen."""
    groups = a[_ROUTE_GROUPS]
    size = a[_NUM_EXPERTS] // groups
    for group in range(groups):
        first, second, has_none = _UNLIKELY, _UNLIKELY, False
        for expert in range(group * size, (group + 1) * size):
            own = _with_bias(a, probabilities, expert, kind)
            has_none = has_none or own != own
            if own > first:
                first, second = own, first
            else:
                second = max(second, own)
        ranks[group] = first + second if a[_ADDS_TWO] else first
        if has_none:  # numbers that are none come first, as with torch
            ranks[group] = -_UNLIKELY
    for group in range(groups):
        num_better = 0
        for other in range(groups):
            if ranks[other] > ranks[group] or (ranks[other] == ranks[group] and other < group):
                num_better += 1
        ranks[groups + group] = _ONE if num_better < a[_NUM_GROUPS] else _ZERO


@inner
def _with_bias(a, probabilities, expert, kind):
    own, bias = probabilities[expert], a[_ROUTE_BIAS]
    if bias:
        own += float32_at(bias)[expert] if a[_IS_WIDE] else get(like(kind, bias), expert)
    return own


@inner
def _best(a, probabilities, ranks, choices, place, kind):
    """
    Return the expert of a chosen group with the largest probability, bias included, that is not among the first `place`
    choices.
    """
    best, most, groups = -1, _UNLIKELY, max(a[_ROUTE_GROUPS], 1)
    size = a[_NUM_EXPERTS] // groups
    for group in range(groups):
        if not a[_ROUTE_GROUPS] or ranks[groups + group] > _ZERO:
            for expert in range(group * size, (group + 1) * size):
                own = _with_bias(a, probabilities, expert, kind)
                # Numbers that are none come first, as with torch.
                if best < 0 or own > most or (own != own and most == most):
                    is_new = True
                    for earlier in range(place):
                        is_new = is_new and choices[earlier] != expert
                    if is_new:
                        best, most = expert, own
    return best


@inner
def group(a, kind):
    """Order the pairs, in one thread."""
    if take(ahead(a, _NEXT)) > 0:
        return
    num, choices, pairs = a[_NUM_TOKENS] * a[_NUM_CHOSEN], int64_at(a[_GROUP_CHOICES]), int64_at(a[_PAIRS])
    places, first, second = int64_at(a[_PLACES]), int64_at(a[_FIRST]), int64_at(a[_SECOND])
    for expert in range(a[_NUM_EXPERTS]):
        first[expert * BLOCK_SIZE + NUM_TOKENS] = 0
    for pair in range(num):
        first[choices[pair] * BLOCK_SIZE + NUM_TOKENS] += 1
    begin = 0
    for expert in range(a[_NUM_EXPERTS]):
        own = first[expert * BLOCK_SIZE + NUM_TOKENS]
        _set_block(ahead(a, _FIRST), ahead(first, expert * BLOCK_SIZE), begin, own)
        _set_block(ahead(a, _SECOND), ahead(second, expert * BLOCK_SIZE), begin, own)
        first[expert * BLOCK_SIZE + NEXT] = begin  # where its next pair goes, for now
        begin += own
    for pair in range(num):
        block = ahead(first, choices[pair] * BLOCK_SIZE)
        place = block[NEXT]
        block[NEXT] += 1
        pairs[place], places[pair] = pair // a[_NUM_CHOSEN], place
    for expert in range(a[_NUM_EXPERTS]):
        first[expert * BLOCK_SIZE + NEXT] = 0


@inner
def _set_block(fields, block, begin, num):
    """Set what depends on an expert's tokens: `fields` are blocks, tokens, outputs, and bytes of a token's numbers."""
    block[NEXT], block[NUM_TOKENS] = 0, num
    block[TOKENS], block[OUTPUTS] = fields[1] + begin * fields[3], fields[2] + begin * fields[4]


@inner
def multiply_each(a, kind, wide_kind):
    """Run each expert's product."""
    for expert in range(a[_OWN_EXPERTS]):
        block = ahead(int64_at(a[_BLOCKS]), expert * BLOCK_SIZE)
        if block[NUM_TOKENS]:
            if a[_IS_TRANSPOSED]:
                multiply_columns(block, kind)
            else:
                multiply(block, kind, wide_kind)


@inner
def combine(a, numbers, kind):
    """Add up the next numbers of a token, until none are left. `numbers` are the fields as float64."""
    factor = np.float32(numbers[_SUMS_FACTOR])
    size, chosen = a[_SIZE], a[_COMBINE_CHOSEN]
    parts = (size + _SHARE - 1) // _SHARE
    number = take(ahead(a, _NEXT))
    while number < a[_NUM_TOKENS] * parts:
        token, begin = number // parts, number % parts * _SHARE
        places = ahead(int64_at(a[_COMBINE_PLACES]), token * chosen)
        weights = ahead(float32_at(a[_COMBINE_WEIGHTS]), token * chosen)
        outputs, gate = ahead(like(kind, a[_SUMS]), token * size), _ONE
        if a[_GATES]:
            gate = _ONE / (_ONE + exponential(-get(like(kind, a[_GATES]), token)))
        for index in range(begin, min(begin + _SHARE, size)):
            total = np.float32(0)
            for place in range(chosen):
                total += weights[place] * get(like(kind, a[_X]), places[place] * size + index)
            if a[_SHARED]:
                total += gate * get(like(kind, a[_SHARED]), token * size + index)
            put(outputs, index, total * factor)
        number = take(ahead(a, _NEXT))
