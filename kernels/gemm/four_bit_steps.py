"""What a program of the products with weights of four bits computes: the sums over K of a tile (`four_bit_linear.py`,
`moe/experts_four_bit.py`). Direct tiles (`four_bit_direct_steps.py`) and `four_bit_dequantise.py` unpack words as here.

Rows of W are the side M of the tensor cores' products, which is at least 64, and tokens the side N: few tokens waste nothing.
Each block of 128 columns of W (`common/four_bit.py`) is unpacked in registers, from which the tensor cores read it. Of INT4
weights they read

    w = q * s - z * s, rounded once to bf16

as in a dequantised weight; here all numbers are smaller by 2^8, which `SIZE` makes up for. A code of four bits, masked out of a
word and read as bf16, is subnormal: bits 3 to 0 are q * 2^-133, bits 7 to 4 q * 2^-129. Multiplied by s * 2^125 or s * 2^121,
both of which bf16 holds for s below 8, it is q * s * 2^-8. `FourBitWeight.shifts` holds -z * s * 2^-8; without it z is 8, and
-8 s * 2^-8 is made of the scale. One fused multiplication and addition rounds once. So eight numbers take four masks, one shift
of bits and four multiplications; scales change by additions to their exponents.

NVFP4 weights (`common/nvfp4.py`; GROUP is 16) have words and scales in the same places. A number without its row scale is exact
in bf16, so none is rounded: sums are multiplied by the row scale at the end (`whole_tile`). Eight numbers take nine instructions
that place their bits (`moe/mxfp4.py`) and four multiplications; a scale of 16 columns of a row takes two more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.common import four_bit
from batchspec.kernels.moe.mxfp4 import times_scale
from batchspec.kernels.moe.packed_tiles import wait_for

SIZE = tl.constexpr(four_bit.SIZE)
LOW_SCALE, HIGH_SCALE = tl.constexpr(0x3E803E80), tl.constexpr(0x3C803C80)
"""Added to the bits of two scales: times 2^125 and 2^121."""
SIGNS, OFFSET = tl.constexpr(-0x7FFF8000), tl.constexpr(0x02800280)
"""The bits of two scales are turned by the first and lowered by the second: times -2^-5."""
NVFP4_BITS, NVFP4_SIZE = tl.constexpr(0x0FF00FF0), tl.constexpr(0x70007000)
"""Of NVFP4: the bits of bf16 that two stored scales have, and the leading bits of two scales * 2^118."""


@triton.jit
def load_tokens(
    x, begin, at, num_rows, k, stride, BLOCK_T: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr
):
    """128 columns of rows of x, transposed: [128, BLOCK_T]. Rows and columns past the last ones are 0 and not read."""
    if TMA:
        tokens = x.load([begin, at])
    else:
        row, column = begin + tl.arange(0, BLOCK_T), at + tl.arange(0, 128)
        places = x + row.to(tl.int64)[:, None] * stride + column[None, :]
        inside = (row < num_rows)[:, None]
        if EVEN_K:
            tokens = tl.load(places, mask=inside, other=0.0)
        else:
            tokens = tl.load(places, mask=inside & (column < k)[None, :], other=0.0)
    tokens = tl.trans(tokens)
    return tokens.to(tl.float32) if INTERPRETED else tokens


@triton.jit
def load_words(w, block, first, n, w_rows, GATED: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """Words of the rows from `first` on of a block of columns: [BLOCK_N, 32]; GATED: of gate and up, [2 * BLOCK_N, 32].

    block: counted over all experts. w: a pointer, or with TMA a descriptor of [blocks * w_rows, 32], if GATED of
    [blocks * 2, rows of the gate, 32]. Rows past the last one are unspecified.
    """
    ALL: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    if TMA and GATED:
        words = w.load([block * 2, first, 0]).reshape(ALL, 32)
    elif TMA:
        words = w.load([block * w_rows + first, 0])
    else:
        lane = tl.arange(0, ALL)
        row = tl.minimum(first + lane % BLOCK_N, tl.cdiv(n, 16) * 16 - 1) + lane // BLOCK_N * n
        words = tl.load(w + block.to(tl.int64) * w_rows * 32 + (row * 32)[:, None] + tl.arange(0, 32)[None, :])
    # 16 rows: [rows 0 or 8, row, thread, i, word]. In the order of the numbers: [.., .., i, thread, word]
    return words.reshape(ALL // 16, 2, 8, 4, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(ALL, 32)


@triton.jit
def load_pairs(source, first, n, last, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """int32 [BLOCK_N / 2]: scales or shifts of two rows each, from row `first` on; GATED: [BLOCK_N], those of up follow.

    source: those of a group
    last: the last pair
    """
    HALF: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N if GATED else HALF)
    pair = first // 2 + (lane % HALF + lane // HALF * (n // 2) if GATED else lane)
    return tl.load(source + tl.minimum(pair, last))


@triton.jit
def of_rows(pairs, LANES: tl.constexpr):
    """int32 [P] of two rows each -> int16 [2 P]. LANES: the first rows of all pairs, then the second ones; otherwise in the order
    of the rows. No number moves between threads."""
    PAIRS: tl.constexpr = pairs.shape[0]
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    if LANES:
        rows = both.permute(1, 0).reshape(2 * PAIRS)
    else:
        rows = both.reshape(PAIRS // 8, 8, 2).permute(0, 2, 1).reshape(2 * PAIRS)
    return rows


@triton.jit
def unpack_int4(words, scale_pairs, shift_pairs, PART: tl.constexpr, LANES: tl.constexpr, INTERPRETED: tl.constexpr):
    """`unpack_part` of INT4 weights."""
    if INTERPRETED:
        code = ((words.to(tl.int32) >> (4 * PART)) & 15).to(tl.float32)
        scale = (of_rows(scale_pairs, LANES).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        shift = scale * -8
        if shift_pairs is not None:
            shift = (of_rows(shift_pairs, LANES).to(tl.int32) << 16).to(tl.float32, bitcast=True) * SIZE
        exact = (code * scale[:, None] + shift[:, None]).to(tl.int32, bitcast=True)
        return ((exact + 0x7FFF + ((exact >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True) / 256
    scale = of_rows(scale_pairs + (LOW_SCALE if PART % 2 == 0 else HIGH_SCALE), LANES)
    if shift_pairs is None:
        shift = of_rows((scale_pairs ^ SIGNS) - OFFSET, LANES)
    else:
        shift = of_rows(shift_pairs, LANES)
    scale = tl.broadcast_to(scale[:, None], words.shape)
    shift = tl.broadcast_to(shift[:, None], words.shape)
    # Each instruction works on two words, two scales and so on. PTX names: $1 words, $2 scales, $3 shifts.
    MASK: tl.constexpr = "0x000F000F" if PART % 2 == 0 else "0x00F000F0"
    PLACE: tl.constexpr = "" if PART < 2 else "shr.u32 v, $1, 8; "
    SOURCE: tl.constexpr = "$1" if PART < 2 else "v"
    return tl.inline_asm_elementwise(
        "{ .reg .b32 v; " + PLACE + "and.b32 v, " + SOURCE + ", " + MASK + "; fma.rn.bf16x2 $0, v, $2, $3; }",
        "=r,r,r,r", [words, scale, shift], dtype=tl.bfloat16, is_pure=True, pack=2,
    )


@triton.jit
def unpack_nvfp4(words, scale_pairs, PART: tl.constexpr, LANES: tl.constexpr, INTERPRETED: tl.constexpr):
    """`unpack_part` of NVFP4 weights without row scales, exact. Each pair has two scales of 8 bits of each row."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    first = of_rows(((scale_pairs << 4) & NVFP4_BITS) | NVFP4_SIZE, LANES)
    second = of_rows(((scale_pairs >> 4) & NVFP4_BITS) | NVFP4_SIZE, LANES)
    scale = tl.broadcast_to(tl.join(first, second)[:, :, None], [ROWS, 2, WORDS // 2]).reshape(ROWS, WORDS)
    return times_scale(words, scale, PART, INTERPRETED)


@triton.jit
def unpack_part(
    words, scale_pairs, shift_pairs, PART: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Code PART of each word, w * 2^-8: bf16 [R, W]; fp32 in Triton's interpreter.

    words        int16 [R, W], those of a group of 16 columns in the first half of W and those of the next one in the second
    scale_pairs  int32 [R / 2] those of the group of 32 columns that code PART is of; shift_pairs alike, or None
    LANES        whether rows are in the order of `of_rows(LANES=True)`
    """
    if GROUP == 16:
        part = unpack_nvfp4(words, scale_pairs, PART, LANES, INTERPRETED)
    else:
        part = unpack_int4(words, scale_pairs, shift_pairs, PART, LANES, INTERPRETED)
    return part


@triton.jit
def unpack_block(words, scales, shifts, GROUP: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The 128 columns of each row: [ROWS, 128]. Joining moves no number between registers.

    scales, shifts: for each of the four parts the pairs of its group, or None for shifts
    """
    zero = unpack_part(words, scales[0], shifts[0], 0, GROUP, False, INTERPRETED)
    one = unpack_part(words, scales[1], shifts[1], 1, GROUP, False, INTERPRETED)
    two = unpack_part(words, scales[2], shifts[2], 2, GROUP, False, INTERPRETED)
    three = unpack_part(words, scales[3], shifts[3], 3, GROUP, False, INTERPRETED)
    parts = tl.join(tl.join(zero, two), tl.join(one, three))  # [ROWS, 32, two bits of the part: high, low]
    return parts.permute(0, 2, 3, 1).reshape(ROWS, 128)


@triton.jit
def load_parts(source, block, stride, first, n, last, GROUP: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pairs of the groups of the four parts of a block of columns: a tuple of four, the same several times in large groups.

    stride: pairs of a group. GROUP: its columns; 0: a row is one group; 16: NVFP4, whose pairs have the scales of 32 columns
    """
    if GROUP == 16 or GROUP == 32:
        own = source + block * 4 * stride
        a = load_pairs(own, first, n, last, GATED, BLOCK_N)
        b = load_pairs(own + stride, first, n, last, GATED, BLOCK_N)
        c = load_pairs(own + 2 * stride, first, n, last, GATED, BLOCK_N)
        d = load_pairs(own + 3 * stride, first, n, last, GATED, BLOCK_N)
        found = (a, b, c, d)
    elif GROUP == 64:
        own = source + block * 2 * stride
        a = load_pairs(own, first, n, last, GATED, BLOCK_N)
        b = load_pairs(own + stride, first, n, last, GATED, BLOCK_N)
        found = (a, a, b, b)
    else:
        group = block // (GROUP // 128) if GROUP else block * 0
        a = load_pairs(source + group * stride, first, n, last, GATED, BLOCK_N)
        found = (a, a, a, a)
    return found


@triton.jit
def halves_of(parts, ROWS: tl.constexpr):
    """The pairs of 2 * ROWS rows, of each part of a block -> those of the first and of the second half of the rows."""
    a, a2 = tl.split(parts[0].reshape(2, ROWS // 2).permute(1, 0))
    b, b2 = tl.split(parts[1].reshape(2, ROWS // 2).permute(1, 0))
    c, c2 = tl.split(parts[2].reshape(2, ROWS // 2).permute(1, 0))
    d, d2 = tl.split(parts[3].reshape(2, ROWS // 2).permute(1, 0))
    return (a, b, c, d), (a2, b2, c2, d2)


@triton.jit
def sum_blocks(
    x, x_more, w, scales, shifts, expert, begin, first, num_rows, n, w_rows, k, stride_x, num_groups, start, stop,
    GROUP: tl.constexpr, GATED: tl.constexpr, TWO: tl.constexpr, BLOCK_T: tl.constexpr, MORE: tl.constexpr,
    BLOCK_N: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Sums over blocks start to stop of K of a tile of BLOCK_N rows of W (GATED: and as many of up) by BLOCK_T rows of x, and by
    the MORE rows after them, times 2^-8: acc, up, acc_more, up_more.

    TWO: as two products of half the tile, gate and up in a gated one. The tensor cores run the first while the second's words
    are unpacked: Triton does not wait for a sum that only the next step of the loop uses, and the wait for the other covers both.
    Otherwise as one product of all rows, in acc.
    MORE: a further product of the same unpacked weights, as a tile of Triton has a power of two of rows; 0: none.
    """
    num_blocks = tl.cdiv(k, 128)
    stride, last = w_rows // 2, tl.cdiv(2 * n if GATED else n, 16) * 8 - 1
    ALL: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    ROWS: tl.constexpr = ALL // 2 if TWO else ALL
    acc = tl.zeros([ROWS, BLOCK_T], tl.float32)
    up = tl.zeros([ROWS, BLOCK_T], tl.float32)
    acc_more = tl.zeros([ROWS, max(MORE, 1)], tl.float32)
    up_more = tl.zeros([ROWS, max(MORE, 1)], tl.float32)
    own_group = (expert * num_groups).to(tl.int64) * stride
    # Scales and shifts are read one block ahead into registers. Loads that Triton pipelines pass through shared memory: with them
    # a tile of 128 x 128 took a little more than half of a Hopper multiprocessor's, and two programs no longer ran on it.
    next_z = (None, None, None, None)
    next_s = load_parts(scales + own_group, tl.minimum(start, stop - 1), stride, first, n, last, GROUP, GATED, BLOCK_N)
    if shifts is not None:
        next_z = load_parts(shifts + own_group, tl.minimum(start, stop - 1), stride, first, n, last, GROUP, GATED, BLOCK_N)
    for block in range(start, stop):
        at = block * 128
        tokens = load_tokens(x, begin, at, num_rows, k, stride_x, BLOCK_T, TMA, EVEN_K, INTERPRETED)
        if MORE:
            more = load_tokens(x_more, begin + BLOCK_T, at, num_rows, k, stride_x, MORE, TMA, EVEN_K, INTERPRETED)
        s, z = next_s, next_z
        ahead = tl.minimum(block + 1, stop - 1)
        next_s = load_parts(scales + own_group, ahead, stride, first, n, last, GROUP, GATED, BLOCK_N)
        if shifts is not None:
            next_z = load_parts(shifts + own_group, ahead, stride, first, n, last, GROUP, GATED, BLOCK_N)
        words = load_words(w, expert * num_blocks + block, first, n, w_rows, GATED, BLOCK_N, TMA)
        if TWO:
            a, b = tl.split(words.reshape(2, ROWS, 32).permute(1, 2, 0))
            s, s2 = halves_of(s, ROWS)
            z2 = z
            if shifts is not None:
                z, z2 = halves_of(z, ROWS)
            values = unpack_block(a, s, z, GROUP, ROWS, INTERPRETED)
            acc = tl.dot(values, tokens, acc, input_precision="ieee")
            if MORE:
                acc_more = tl.dot(values, more, acc_more, input_precision="ieee")
            values = unpack_block(b, s2, z2, GROUP, ROWS, INTERPRETED)
            if MORE:
                up_more = tl.dot(values, more, up_more, input_precision="ieee")
            up = tl.dot(values, tokens, up, input_precision="ieee")
            up = up if INTERPRETED else wait_for(up)
        else:
            values = unpack_block(words, s, z, GROUP, ROWS, INTERPRETED)
            if MORE:
                acc_more = tl.dot(values, more, acc_more, input_precision="ieee")
            acc = tl.dot(values, tokens, acc, input_precision="ieee")
            acc = acc if INTERPRETED else wait_for(acc)
    return acc, up, acc_more, up_more
