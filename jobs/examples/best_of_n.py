"""Best of n: several answers to each question, a score for each from a scorer, and the best one of each question.

    python jobs/examples/best_of_n.py [model.path=MODEL] [decode.n=8] [any other key of a job]
    python jobs/examples/best_of_n.py reward=REWARD_MODEL [model.path=MODEL] [...]

The scorer is the same model, asked for a number, or with reward=REWARD_MODEL the first label of a reward model, which reads the
chats with their answers after the first model has left the memory. With jobs on disk, `batchspec export --to preference` writes
the best and the worst answer of each question as a pair (jobs/pages/input.md).
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
REWARD = "reward="
KEY = ["row_index", "sample_index"]


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


def own_scores(engine: batchspec.Engine, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """The answers, with the scores that the same model gives them."""
    turns = engine.converse(rows, next_turn)
    scores = turns.filter(turn=1).select(*KEY, score=pl.col("completion").map_elements(score_of, pl.Int64))
    return turns.filter(turn=0).join(scores, on=KEY, how="left", maintain_order="left")


def rewards(answers: pl.DataFrame, model: str) -> pl.DataFrame:
    """The answers, with the scores of a reward model: a job of its own over the first one's output."""
    keys = [f"model.path={model}", "task=reward"]
    judged = batchspec.generate(batchspec.JobOutput(answers, name="answers"), overrides=keys)
    own = {name: f"answers_{name}" for name in ("request_id", "sample_index")}
    scores = judged.select(**own, score=pl.col("scores").list.first().struct.field("score"))
    return answers.join(scores, on=[*own], how="left", maintain_order="left")


def run(options: Sequence[str] = (), questions: Sequence[str] = QUESTIONS) -> pl.DataFrame:
    """The best answer to each question, with its score; of equal scores that of the lowest sample_index."""
    reward = next((word.removeprefix(REWARD) for word in options if word.startswith(REWARD)), None)
    keys = [*OPTIONS, *(word for word in options if not word.startswith(REWARD))]
    rows = [{"question": text, "messages": [{"role": "user", "content": text}]} for text in questions]
    with batchspec.Engine(keys) as engine:
        answers = own_scores(engine, rows) if reward is None else engine.generate(rows)
    if reward is not None:
        answers = rewards(answers, reward)
    best = answers.sort("score", descending=True, nulls_last=True, maintain_order=True).unique("row_index", keep="first")
    return best.sort("row_index")


if __name__ == "__main__":
    found = script(run, __doc__)
    with pl.Config(fmt_str_lengths=400, tbl_width_chars=120):
        print(found.select("question", "score", "completion"))
