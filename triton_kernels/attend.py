# ruff: noqa: RUF005  (Triton's compiler knows no starred expressions)
"""Attention over packed pages: for a decode step and, with more rows, for a chunk of a prompt over its packed history.

    part of split s:   o_s = sum_t p_t v_t / sum_t p_t,   l_s = log sum_t exp(x_t),   x_t = scale q . k_t,
                       p_t = exp(x_t - max x),   t over the split's tokens in [low, high)
                       with a soft cap (CAPPED), cap tanh(x_t / cap) in place of x_t

One program attends one split of one request for all query heads of one KV head, M rows at a time: a packed byte is
read and unpacked once. Everything is decided on the device: which page, whether it exists, whether the slab is
packed, which tokens are seen. `merge` joins the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_kvq.triton_kernels.fragments import fragment_index, lanes_of_columns, mma_order
from vllm_kvq.triton_kernels.keys.boosted import boosted_scores
from vllm_kvq.triton_kernels.keys.channel import channel_scores, hybrid_scores, key_shift, query_channel
from vllm_kvq.triton_kernels.keys.polar import polar_scores
from vllm_kvq.triton_kernels.keys.transformed import AHEAD, scores_of_means, transformed_middle, transformed_scores
from vllm_kvq.triton_kernels.lang import LN2, LOG2E, LOWEST, MAGIC, SUBNORMAL, capped, column_max, column_sum
from vllm_kvq.triton_kernels.rotation import rotated_back
from vllm_kvq.triton_kernels.turning import page_slab
from vllm_kvq.triton_kernels.values import hybrid_values, sums_weights, token_values, value_shift


@triton.jit(do_not_specialize=["queries", "out_split"])
def attend_kernel(
    query_ptr,
    words_ptr,
    halves_ptr,
    table_ptr,
    low_ptr,
    high_ptr,
    start_ptr,
    out_ptr,
    lse_ptr,
    turn_ptr,
    scale,
    queries,
    heads,
    pages,
    query_request,
    query_token,
    query_head,
    page_words,
    head_words,
    table_row,
    table_width,
    out_split,
    cap,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SHARE: tl.constexpr,
    M: tl.constexpr,
    TURN: tl.constexpr,
    EXTRA: tl.constexpr,
    LISTED: tl.constexpr,
    RAGGED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """See the module. Grid: (requests * heads * row tiles, splits). For transformed keys, a row of query_ptr is what
    keys/transformed.py says, and turn_ptr what turning.py does."""
    operands: tl.constexpr = K.operands
    value_blocks: tl.constexpr = R.d // V.block
    numbers: tl.constexpr = K.slots if K.transformed else R.head  # of a query, that are operands
    k_codes: tl.constexpr = K.slots if K.transformed else R.d  # codes of a key
    tiles = (queries * SHARE + M - 1) // M
    head = tl.program_id(0) // tiles % heads
    request = tl.program_id(0) // tiles // heads
    split, splits = tl.program_id(1), tl.num_programs(1)

    # queries, one operand per plane
    row = tl.program_id(0) % tiles * M + tl.arange(0, M)
    # the queries of all requests are in one list, divided by start_ptr, or with `queries` for each request
    first_row, count_rows = request * queries, queries
    q_first = query_ptr + request.to(tl.int64) * query_request
    if RAGGED:
        first_row = tl.load(start_ptr + request).to(tl.int32)
        count_rows = tl.load(start_ptr + request + 1).to(tl.int32) - first_row
        q_first = query_ptr + first_row.to(tl.int64) * query_token
    real = row < count_rows * SHARE
    q_row = q_first + row // SHARE * query_token
    q_row += (head * SHARE + row % SHARE) * query_head
    at = mma_order(tl.arange(0, 16))
    top = tl.full((M,), 1.0e-30, tl.float32)
    raw = ()
    for i in tl.static_range(operands):
        channel = query_channel(at, R, K, i, K.chunk)
        inside = real[None, :] & ((at < K.chunk) & (channel < numbers))[:, None]
        x = tl.load(q_row[None, :] + channel[:, None], mask=inside, other=0.0).to(tl.float32)
        raw = raw + (x,)
        top = tl.maximum(top, column_max(tl.abs(x)))
    q = ()
    for i in tl.static_range(operands):
        plane_factor = 1.0 if K.polar else 1.0 / (1 << key_shift(i * K.chunk, k_codes, K.hybrid, K.bits))
        x = (raw[i] * plane_factor / top[None, :]).to(tl.float16)
        if K.channel or K.hybrid:
            x = lanes_of_columns(x)
        q = q + (x,)
    unit = top * (scale * LOG2E * SUBNORMAL)
    if K.transformed:
        middle = transformed_middle(q, K)
        means = tl.full((AHEAD, M), 0.0, tl.float32)
    step = unit  # the unit of a capped score
    if CAPPED:
        step = tl.full((M,), 1.0, tl.float32)

    # this split's share of the request's slabs
    low, high = 0, table_width * (R.slabs * 32)
    if not LISTED:
        low = tl.maximum(tl.load(low_ptr + request).to(tl.int32), 0)
        high = tl.minimum(tl.load(high_ptr + request).to(tl.int32), high)
    if RAGGED:  # a tile beyond this request's rows
        high = tl.where(tl.program_id(0) % tiles * M < count_rows * SHARE, high, 0)
    first = low // (32 * TURN)
    count = tl.maximum((high + 32 * TURN - 1) // (32 * TURN) - first, 0)
    share = (count + splits - 1) // splits
    begin = first + split * share
    end = tl.minimum(begin + share, first + count)

    if K.boosted > 0:  # each lane's own row, and four times the factor of the queries in q
        own = tl.program_id(0) % tiles * M + tl.arange(0, 4 * M) // 4
        own = tl.minimum(own, count_rows * SHARE - 1)
        lane_query = q_first + own // SHARE * query_token + (head * SHARE + own % SHARE) * query_head
        lane_query = lane_query[:, None]
        lane_factor = tl.reshape(tl.broadcast_to((4.0 / top)[:, None], (M, 4)), (4 * M, 1))
    best = tl.full((M,), LOWEST, tl.float32)
    total = tl.full((M,), 0.0, tl.float32)
    extra = tl.full((EXTRA, M), 0.0, tl.float32)
    acc = ()
    for _ in tl.static_range(value_blocks):
        acc = acc + (tl.full((V.places, M), 0.0, tl.float32),)
    token = fragment_index(tl.arange(0, 32), 4)
    full = tl.where(pages > 0, -1, 0)  # always -1, which the compiler does not know
    for i in range(begin, end):
        turns: tl.constexpr = R.slabs // TURN
        page = tl.load(table_ptr + request * table_row + i // turns).to(tl.int64)
        ok = (page >= 0) & (page < pages)
        # a page that does not exist is read as page 0, and none of it is seen
        record = tl.where(ok, page, 0) * page_words + head * head_words
        base, base16 = words_ptr + record, halves_ptr + record * 2
        ok = ok & (tl.load(base) == MAGIC)
        from_, to = low - i * (32 * TURN), high - i * (32 * TURN)
        if LISTED:  # every page has its own limits, counted from its first token
            place = request * table_row + i // turns
            from_ = tl.load(low_ptr + place).to(tl.int32) - i % turns * (32 * TURN)
            to = tl.load(high_ptr + place).to(tl.int32) - i % turns * (32 * TURN)
        slab = i % turns * TURN
        k_words = base + R.slabs_at + slab * R.slab_words
        k_halves = base16 + (R.slabs_at + slab * R.slab_words) * 2
        if K.channel:
            sums = channel_scores(q, k_words, k_halves, R, K, TURN, M)
            if K.boosted > 0:
                sums = boosted_scores(sums, lane_query, lane_factor, k_words, k_halves, R, K, TURN, M)
        elif K.hybrid:
            sums = hybrid_scores(q, k_words, k_halves, base16, full, R, K, TURN, M)
        elif K.transformed:
            place = (i - begin) % (AHEAD // TURN) * TURN
            if place == 0:
                ahead = i + tl.arange(0, AHEAD) // TURN
                of = tl.load(table_ptr + request * table_row + ahead // turns, mask=ahead < end, other=0).to(tl.int64)
                of = tl.where((of >= 0) & (of < pages), of, 0) * page_words + head * head_words
                number = page_slab(words_ptr + of) + ahead % turns * TURN + tl.arange(0, AHEAD) % TURN
                # always R.columns // 2, which the compiler does not know
                pairs = tl.minimum(R.columns // 2, pages * R.columns)
                means = scores_of_means(q_row, real, top * SUBNORMAL, turn_ptr, number, pairs, R, K, M)
            sums = transformed_scores(q, middle, means, place, k_words, R, K, TURN, M)
        else:
            sums = polar_scores(q, k_words, base16, full, R, K, TURN, M)
        scores, live = (), ()
        for j in tl.static_range(TURN):
            flags = tl.load(base + 4 + (slab + j) // 4) >> ((slab + j) % 4 * 8)
            packed = ok & ((flags & 255) == 1)
            # one comparison for both ends: below `from_` the difference wraps around
            span = tl.where(packed, tl.maximum(to - from_, 0), 0)
            seen = (token - (from_ - 32 * j)).to(tl.uint32, bitcast=True) < span.to(tl.uint32, bitcast=True)
            score = sums[j]
            if CAPPED:
                score = capped(score * unit[None, :], cap * LOG2E)
            scores = scores + (tl.where(seen[:, None], score, float("-inf")),)
            live = live + (tl.where(packed, 1, 0),)
        most = scores[0]
        for j in tl.static_range(1, TURN):
            most = tl.maximum(most, scores[j])
        new = tl.maximum(best, column_max(most) * step)
        decay = tl.exp2(best - new)
        best = new
        if V.by_token and not sums_weights(R.d, V.group):
            total *= decay
        extra *= decay[None, :]
        faded = ()
        for b in tl.static_range(value_blocks):
            faded = faded + (acc[b] * decay[None, :],)
        acc = faded
        for j in tl.static_range(TURN):
            weights = tl.exp2(scores[j] * step[None, :] - new[None, :])
            if V.by_token:
                if not sums_weights(R.d, V.group):
                    total += column_sum(weights)
                acc, extra = token_values(
                    weights, acc, extra, k_words + j * R.slab_words, k_halves + j * R.slab_words * 2, live[j], R, V
                )
            else:
                acc, sums = hybrid_values(
                    weights, acc, k_words + j * R.slab_words, k_halves + j * R.slab_words * 2, live[j], full, R, V
                )
                if EXTRA == 8:
                    sums = tl.split(tl.permute(tl.reshape(sums, (2, 8, M)), (1, 2, 0)))[0]
                extra += sums

    # out (splits, requests * queries or all tokens, query heads, R.head), dense
    whole = (first_row + row // SHARE) * (heads * SHARE) + head * SHARE + row % SHARE
    target = split.to(tl.int64) * out_split + whole
    group = tl.arange(0, 16)
    if V.by_token:
        if sums_weights(R.d, V.group):
            total = column_max(tl.where(group[:, None] < 8, 0.0, extra))
    else:  # the rows are equal
        total = column_max(extra * -(SUBNORMAL / (1 << V.bits << value_shift(0, V.by_token, V.bits))))
    norm = 1.0 / tl.maximum(total, 1.0e-30)
    written = real
    if RAGGED:  # `merge` does not read what a split without tokens would write
        written = row < tl.where(begin < end, count_rows * SHARE, 0)
    column = fragment_index(tl.arange(0, V.places), V.places // 8)
    blocks = ()
    for b in tl.static_range(value_blocks):
        # the plane of the block, and its share of the zeros
        lift = SUBNORMAL / (1 << value_shift(b * V.block // (R.d * V.bits // 8), V.by_token, V.bits))
        o = acc[b] * lift
        if V.by_token:
            zero = column_sum(tl.where(group[:, None] == b * V.block // V.group, extra, 0.0))
            o = (o + zero[None, :] * V.middle) * V.step
        blocks = blocks + (o * norm[None, :],)
    if V.rotated > 0:
        blocks = rotated_back(blocks, V.rotated, V.block, R.d)
    for b in tl.static_range(value_blocks):
        channel = b * V.block + column
        inside = ((column < V.block) & (channel < R.head))[:, None] & written[None, :]
        tl.store(out_ptr + target[None, :] * R.head + channel[:, None], blocks[b], mask=inside)
    lse = tl.where(total > 0, (best + tl.log2(tl.maximum(total, 1.0e-30))) * LN2, float("-inf"))
    tl.store(lse_ptr + target, lse, mask=real)
