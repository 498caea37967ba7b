"""Which algorithm an exchange between GPUs uses, by the number of ranks and its bytes.

This is a table and not a measurement at run time, because all ranks must make the same choice. No choice changes the bits of a
sum. Microseconds on 2 and on 4 H200 joined all to all by NVLink, without multicast, in CUDA graphs: bf16 rows of 8192, KB of one
rank; the first three columns are sums alone, the last three sums with the residual sum and the norm
(`python -m batchspec.kernels.benchmarks --ranks 2`, and `4`):

             2 ranks                                      4 ranks
      KB     NCCL  one   two   NCCL, norm  one   two      NCCL  one   two   NCCL, norm  one   two
      64     14.7   4.6   7.7         8.8   5.4   8.4     20.2   5.8   8.1        12.3   7.3   8.7
     128     15.3   4.8   8.0         9.0   5.6   8.7     19.4   6.3   8.8        12.7   7.7   9.3
     256     15.6   5.1   8.8        10.1   6.0   9.5     20.6   7.1   9.2        12.9   8.4   9.9
     512     18.1   5.8   9.1        11.8   6.7   9.8     23.5   9.8  10.2        15.9  11.5  10.8
    1024     22.9   7.3  10.1        15.5   8.2  10.8     26.8  15.3  12.0        19.5  17.2  12.9
    2048     35.8  11.1  14.1        28.8  11.4  14.6     34.3  25.6  18.2        28.7  29.2  18.8
    4096     39.0  17.3  19.7        34.5  18.1  20.4     48.6  45.5  28.2        42.0  49.8  28.8
    8192     60.2  31.2  34.2        53.0  32.7  35.6     66.7  84.8  50.0        66.5  90.5  50.9

256 values of fp32 on 2 and on 4 ranks: best 4.1 and 5.9, gather 4.1 and 6.3, sum 3.9 and 4.9, NCCL's all_gather 10.8 and 14.5.
"""

from __future__ import annotations

ONE_SHOT_BYTES = {2: 1 << 62, 4: 384 << 10, 8: 96 << 10}
"""Up to this many bytes a sum takes one shot: each rank reads the whole tensor of every other rank. In two shots it reads its
share of each tensor, waits at a second barrier, and reads the sums of the others. Two ranks read as much in two shots as in one,
so they never take two. Four ranks: for sums with a norm the faster choice changes between 256 and 512 KB, for others just above
512 KB. The limit of eight is computed from that of four: two shots save 1.5 times the bytes of a tensor on four ranks and 5.25
times on eight, so they make up for the second barrier at 2 / 7 of the bytes."""
LIBRARY_BYTES = {2: 16 << 20, 4: 32 << 20, 8: 32 << 20}
"""Beyond this many bytes prefill uses the library; rounds do beyond their buffers, which are as large as their largest sum. The
kernels are faster at all sizes above; but prefill's buffers take four times these bytes of a GPU's memory, hence the limit."""


def takes_two_shots(ranks: int, num_bytes: int) -> bool:
    """Whether kernels sum tensors of this many bytes in two shots. ranks: 2, 4 or 8."""
    return num_bytes > ONE_SHOT_BYTES[ranks]
