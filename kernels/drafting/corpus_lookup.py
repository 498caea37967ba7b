"""Drafts from a corpus of other rows' tokens: the tokens after an earlier n-gram match, found through a hash table.

    h(n) = hash of the row's n newest tokens,   entry = table[h(n) mod E],   for each n in `lengths`
    entry: corpus index of the n-gram's last token, and a trust of 1..255 (of 256) in its continuation; 0: empty

Hashes collide, so an entry is used only if the corpus really holds the n tokens found. The match then grows to the left while
older tokens agree, up to max_ngram. The longest match wins; of equally long ones that of the larger n. If it is longer than the
match within the row (`ngram_lookup`), it replaces that proposal with growth * match * trust / 256 draft tokens, at least one, up
to the end of the matched document (a token below 0).
Two buffers: the host fills one while rounds read the other; `which` selects the one to read.
Bound by launch latency: a few dozen scattered reads a row.
Source: drafts by retrieval, He et al. 2023, REST (arXiv 2311.08252); Oliaro et al. 2024, SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.sampling.counter_rng import mix32, mix32_reference

TRUST_BITS = 8
SEED = 0x1E3779B9  # mix32(0) = 0: without a seed all sequences of token 0 would have the same hash


@triton.jit(do_not_specialize=["max_draft_len", "growth", "width", "num_entries", "corpus_len"])
def corpus_lookup_kernel(
    tokens, num_tokens, live, which, table, corpus, draft_ids, draft_len, match_len, stride_row, draft_stride, max_draft_len,
    growth, width, num_entries, corpus_len,
    LENGTHS: tl.constexpr, MAX_NGRAM: tl.constexpr, PAST_LANES: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = tokens + row * stride_row
    last = tl.where(tl.load(live + row) != 0, tl.load(num_tokens + row) - 1, -1)
    buffer = tl.load(which).to(tl.int64)
    table += buffer * num_entries
    corpus += buffer * corpus_len
    back = tl.arange(0, PAST_LANES)
    past = tl.load(base + last - back, mask=(back < MAX_NGRAM) & (back <= last), other=-2)
    h = tl.full([], 0x1E3779B9, tl.uint32)  # SEED
    longest = tl.full([], 0, tl.int32)
    best_end = tl.full([], 0, tl.int32)
    best_trust = tl.full([], 0, tl.int32)
    for n in tl.static_range(1, MAX_NGRAM + 1):
        token = tl.load(base + last - (n - 1), mask=last >= n - 1, other=0)
        h = mix32(h + token.to(tl.uint32, bitcast=True))
        if (LENGTHS >> n) & 1:
            entry = tl.load(table + (h.to(tl.int64) & (num_entries - 1)))
            end = ((entry >> 8) & 0x7FFFFFFF).to(tl.int32)
            trust = (entry & 255).to(tl.int32)
            found = tl.load(corpus + end - back, mask=(back < MAX_NGRAM) & (back <= end), other=-1)
            length = tl.min(tl.where(found == past, MAX_NGRAM, back), 0)
            better = (length >= n) & (length >= longest) & (trust > 0)
            longest = tl.where(better, length, longest)
            best_end = tl.where(better, end, best_end)
            best_trust = tl.where(better, trust, best_trust)
    if longest > tl.load(match_len + row):
        lane = tl.arange(0, LANES)
        ids = tl.load(corpus + best_end + 1 + lane, mask=best_end + 1 + lane < corpus_len, other=-1)
        until_end = tl.min(tl.where(ids < 0, lane, LANES), 0)
        max_count = tl.minimum(max_draft_len, tl.maximum(1, (growth * longest * best_trust) >> 8))
        count = tl.minimum(until_end, max_count)
        tl.store(draft_ids + row * draft_stride + lane, tl.where(lane < count, ids, 0), mask=lane < width)
        tl.store(draft_len + row, count)
        tl.store(match_len + row, MAX_NGRAM + longest)


def corpus_lookup(
    tokens: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    which: Tensor,
    table: Tensor,
    corpus: Tensor,
    *,
    lengths: Sequence[int],
    max_ngram: int,
    max_draft_len: int,
    growth: int,
    draft_ids: Tensor,
    draft_len: Tensor,
    match_len: Tensor,
    interpret: bool = False,
) -> None:
    """Replace a row's own lookup drafts by drafts from the corpus if these have the longer match.

    tokens      int32 [R, L]  rows may be slices of wider ones
    num_tokens  int32 [R]     committed tokens of each row; later columns are not read
    live        int32 [R]     0: the row's drafts stay unchanged
    which       int32 [1]     0 or 1: the buffer to read
    table       int64 [2, E]  entries, see `pack_entries`; E a power of two
    corpus      int32 [2, C]  tokens; below 0 between documents and after the last one
    draft_ids   int32 [R, K], draft_len and match_len int32 [R]: as written by `ngram_lookup`; overwritten if the corpus wins,
                and match_len is then max_ngram + the number of matching tokens
    lengths     ascending, in 1..max_ngram: the n for which the table was built

    growth >= 1, 0 <= max_draft_len <= K. Does not synchronise on a GPU. Raises ValueError for other values, shapes, dtypes or
    strides.
    """
    num_rows, width = draft_ids.shape
    (_, num_entries), (_, corpus_len) = table.shape, corpus.shape
    check("corpus_lookup: tokens", tokens, (num_rows, tokens.shape[1]), torch.int32, rows=True)
    for name, tensor in (("num_tokens", num_tokens), ("live", live), ("draft_len", draft_len), ("match_len", match_len)):
        check(f"corpus_lookup: {name}", tensor, (num_rows,), torch.int32)
    check("corpus_lookup: which", which, (1,), torch.int32)
    check("corpus_lookup: table", table, (2, num_entries), torch.int64)
    check("corpus_lookup: corpus", corpus, (2, corpus_len), torch.int32)
    check("corpus_lookup: draft_ids", draft_ids, (num_rows, width), torch.int32, rows=True)
    if num_entries & (num_entries - 1) or not num_entries:
        raise ValueError(f"corpus_lookup: table has {num_entries} entries; must be a power of two")
    if not lengths or list(lengths) != sorted(set(lengths)) or lengths[0] < 1 or lengths[-1] > max_ngram:
        raise ValueError(f"corpus_lookup: lengths are {list(lengths)}; must be ascending in 1..{max_ngram}, max_ngram")
    if growth < 1 or not 0 <= max_draft_len <= width:
        raise ValueError(f"corpus_lookup: growth={growth}, max_draft_len={max_draft_len}; must be at least 1, and in 0..{width}")
    if not (tokens.is_cuda or interpret):
        corpus_lookup_reference(
            tokens, num_tokens, live, which, table, corpus, lengths=lengths, max_ngram=max_ngram, max_draft_len=max_draft_len,
            growth=growth, draft_ids=draft_ids, draft_len=draft_len, match_len=match_len,
        )
    elif num_rows:
        corpus_lookup_kernel[(num_rows,)](
            tokens, num_tokens, live, which, table, corpus, draft_ids, draft_len, match_len, tokens.stride(0),
            draft_ids.stride(0), max_draft_len, growth, width, num_entries, corpus_len,
            LENGTHS=sum(1 << n for n in lengths), MAX_NGRAM=max_ngram, PAST_LANES=max(2, triton.next_power_of_2(max_ngram)),
            LANES=max(2, triton.next_power_of_2(width)), num_warps=1,
        )


def corpus_lookup_reference(
    tokens: Tensor, num_tokens: Tensor, live: Tensor, which: Tensor, table: Tensor, corpus: Tensor, *, lengths: Sequence[int],
    max_ngram: int, max_draft_len: int, growth: int, draft_ids: Tensor, draft_len: Tensor, match_len: Tensor,
) -> None:
    """The same in plain torch."""
    entries, documents = table[int(which)], corpus[int(which)]
    last = torch.where(live != 0, num_tokens - 1, -1).long()
    back = torch.arange(max_ngram, device=tokens.device)
    indices = last[:, None] - back
    past = torch.where(indices >= 0, tokens.gather(1, indices.clamp(min=0)), -2)
    hashes = torch.full_like(past[:, 0], SEED)
    longest, best_end, best_trust = torch.zeros(3, len(last), dtype=torch.int64, device=tokens.device)
    for n in range(1, max_ngram + 1):
        hashes = next_hash(hashes, past[:, n - 1])
        if n not in lengths:
            continue
        entry = entries[hashes.long() & (len(entries) - 1)]
        end, trust = entry >> TRUST_BITS & 0x7FFFFFFF, entry & 255
        found = torch.where(end[:, None] >= back, documents[(end[:, None] - back).clamp(min=0)], -1)
        length = (found == past).long().cumprod(1).sum(1)
        better = (length >= n) & (length >= longest) & (trust > 0)
        longest, best_end, best_trust = (
            torch.where(better, new, old) for new, old in ((length, longest), (end, best_end), (trust, best_trust))
        )
    wins = longest > match_len
    lane = torch.arange(draft_ids.shape[1], device=tokens.device)
    following = best_end[:, None] + 1 + lane
    ids = torch.where(following < len(documents), documents[following.clamp(max=len(documents) - 1)], -1)
    until_end = (ids >= 0).long().cumprod(1).sum(1)
    count = torch.minimum(until_end, (growth * longest * best_trust >> TRUST_BITS).clamp(min=1, max=max_draft_len))
    draft_ids.copy_(torch.where(wins[:, None], ids * (lane < count[:, None]), draft_ids))
    draft_len.copy_(torch.where(wins, count, draft_len))
    match_len.copy_(torch.where(wins, max_ngram + longest, match_len))


def next_hash(hashes: Tensor, older: Tensor) -> Tensor:
    """int32 hashes of the n + 1 newest tokens, from the hashes of the n newest (SEED for n = 0) and the token before these."""
    return mix32_reference(hashes + older)


def pack_entries(count: Tensor, end: Tensor, trust: Tensor) -> Tensor:
    """int64 table entries; of colliding entries the largest is kept: the most frequent n-gram, of equally frequent ones the
    latest.

    All arguments are int64: count of the n-gram, end its last corpus index, trust in 1..255.
    """
    return (count.clamp(max=(1 << 23) - 1) << (31 + TRUST_BITS)) | (end << TRUST_BITS) | trust
