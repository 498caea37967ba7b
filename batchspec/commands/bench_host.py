"""`batchspec bench --host`: the host's time for a round and for a row that enters, without a model.

Scheduler, page pools, uploads and the reading of results are those of a job, on CPU tensors; no model is computed. Rows are as
short as GSM8K's: about 140 prompt tokens and as many output tokens, of which a round emits 1 to 4 per row. Figures are CPU time
of the engine's thread in microseconds, in the fastest of several turns:

    round_us = schedule_round_us + launch_round_us + process_round_us                per round, however many rows end in it
    row_us   = take_row_us + schedule_row_us + launch_row_us + process_row_us + finish_row_us

`row_us` is per row: its share of a refill, and its end. Requests are taken from their stream after each result, as in a job.
`refill_us` is the time per refill, from the choice of its rows to its launch. If it is longer than the rounds in flight take on
the device, the device waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from batchspec import terminal
from batchspec.arguments import ArgumentParser
from batchspec.commands.stand_in_device import StandInEngine
from batchspec.records import Request, SamplingParams

MAX_NEW_TOKENS = 512
SYSTEM_TOKENS = 24
"""Number of tokens with which every prompt begins, the same in all: one whole page."""
STOP_ID = 2


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="batchspec bench --host", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=140, help="of a prompt, and of an output, on average")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if value < (least := 2 if name == "tokens" else 1):
            parser.error(f"--{name} {value}: must be at least {least}")
    torch.set_num_threads(1)
    requests = list(some_requests(args.rows, args.tokens))
    engine = StandInEngine(args.slots, SYSTEM_TOKENS + 2 * args.tokens + MAX_NEW_TOKENS)
    turns = [measure(engine, requests) for _ in range(args.turns)]
    terminal.show_json(min(turns, key=lambda facts: facts["seconds"]))
    return 0


def some_requests(num_rows: int, num_tokens: int) -> Iterator[Request]:
    """Greedy rows. Prompts and outputs have half to one and a half times as many tokens, prompts at least SYSTEM_TOKENS."""
    random = np.random.default_rng(0)
    system_prompt = random.integers(3, 1000, SYSTEM_TOKENS, np.int32)
    lengths = random.integers(num_tokens // 2, num_tokens + num_tokens // 2, (num_rows, 2)).tolist()
    for i, (prompt_len, output_len) in enumerate(lengths):
        question = random.integers(3, 1000, max(1, prompt_len - SYSTEM_TOKENS), np.int32)
        yield Request(
            request_id=f"row-{i}", row_index=i, sample_index=0, shard=0, prompt_ids=np.concatenate((system_prompt, question)),
            max_new_tokens=MAX_NEW_TOKENS, min_new_tokens=0, sampling=SamplingParams(), stop_ids=(STOP_ID,), stop=(), seed=i,
            predicted_tokens=num_tokens, synthetic_len=output_len,
        )  # fmt: skip


def measure(engine: StandInEngine, requests: Sequence[Request]) -> dict[str, float]:
    """One run over all requests."""
    rounds, refills = engine.totals.rounds, engine.executor.num_refills
    engine.watch.restart()
    for _ in engine.run(iter(requests)):
        pass
    return figures(engine.watch.seconds, engine.totals.rounds - rounds, engine.executor.num_refills - refills, len(requests))


def figures(seconds: Mapping[str, float], rounds: int, refills: int, rows: int) -> dict[str, float]:
    """Microseconds per round, per row and per refill, from the engine's `watch`."""
    by_round = {f"{part}_round_us": seconds[f"{part} round"] / rounds for part in ("schedule", "launch", "process")}
    by_row = {f"{part}_row_us": seconds[f"{part} refill"] / rows for part in ("schedule", "launch", "process")}
    by_row |= {"take_row_us": seconds["take"] / rows, "finish_row_us": seconds["finish"] / rows}
    refill_s = (seconds["schedule refill"] + seconds["launch refill"]) / refills
    sums = {"round_us": sum(by_round.values()), "row_us": sum(by_row.values()), "refill_us": refill_s}
    micros = {name: round(value * 1e6, 1) for name, value in (sums | by_round | by_row).items()}
    return {
        "rows": rows,
        "rounds": rounds,
        "refills": refills,
        "seconds": round(sum(seconds.values()) - seconds["stand-in"], 3),
        **micros,
    }
