"""Best of n: several answers to each question, a score for each from a scorer, and the best one of each question.

    python jobs/examples/best_of_n.py [model.path=MODEL] [decode.n=8] [any other key of a job]

The scorer here is the same model, asked for a number. A reward model of your own, called in `next_turn`, would return None there
and keep its score by (turn.completion.row_index, turn.completion.sample_index).
"""

import re
from collections.abc import Sequence
from typing import Any

import polars as pl

import batchspec
from batchspec.cli import script
from batchspec.warm.conversations import Turn

OPTIONS = ["model.path=smollm2-135m", "model.max_len=1024", "decode.max_new_tokens=64", "decode.n=4", "decode.temperature=0.9"]
QUESTIONS = ["Why is the sky blue?", "Explain in one sentence what a hash table is."]
SCORE = "Question: {question}\nAnswer: {answer}\nRate the answer from 0 (wrong) to 10 (perfect). Reply with the number alone."


def next_turn(turn: Turn) -> dict[str, Any] | None:
    """After an answer the scorer's chat, after the score nothing."""
    if turn.number == 1:
        return None
    text = SCORE.format(question=turn.row["question"], answer=turn.completion.text)
    return {"messages": [{"role": "user", "content": text}], "max_new_tokens": 4, "temperature": 0.0}


def score_of(text: str | None) -> int:
    """The first number of a scorer's reply, at most 10; -1 without one."""
    found = re.search(r"\d+", text or "")
    return min(int(found[0]), 10) if found else -1


def run(options: Sequence[str] = (), questions: Sequence[str] = QUESTIONS) -> pl.DataFrame:
    """The best answer to each question, with its score; of equal scores that of the lowest sample_index."""
    rows = [{"question": text, "messages": [{"role": "user", "content": text}]} for text in questions]
    with batchspec.Engine([*OPTIONS, *options]) as engine:
        turns = engine.converse(rows, next_turn)
    key = ["row_index", "sample_index"]
    scores = turns.filter(turn=1).select(*key, score=pl.col("completion").map_elements(score_of, pl.Int64))
    answers = turns.filter(turn=0).join(scores, on=key, how="left", maintain_order="left")
    best = answers.sort("score", descending=True, nulls_last=True, maintain_order=True).unique("row_index", keep="first")
    return best.sort("row_index")


if __name__ == "__main__":
    found = script(run, __doc__)
    with pl.Config(fmt_str_lengths=400, tbl_width_chars=120):
        print(found.select("question", "score", "completion"))
