"""A judge loop: the model checks its own answer and corrects it until it is content, three times at most.

    python jobs/examples/judge_loop.py [model.path=MODEL] [any other key of a job]

Answer, verdict and correction are turns of one chat, so that each reuses the K/V of the turns before.
"""

from collections.abc import Sequence
from typing import Any

import polars as pl

import batchspec
from batchspec.cli import script
from batchspec.warm.conversations import Turn

OPTIONS = ["model.path=smollm2-135m", "model.max_len=1024", "decode.max_new_tokens=96"]
QUESTIONS = ["Which planet is nearest to the sun?", "Name the capital of Australia.", "How many legs has a spider?"]
CHECK = "Is this answer correct and complete? Reply with yes or no alone."
CORRECT = "Then correct it. Write the corrected answer alone."
MAX_CORRECTIONS = 3


def is_verdict(turn: Turn) -> bool:
    """Turns are answer, verdict, answer, verdict ..."""
    return turn.number % 2 == 1


def next_turn(turn: Turn) -> dict[str, Any] | list[Any] | None:
    """A verdict after each answer, an answer after each verdict that is not yes."""
    if not is_verdict(turn):
        return {"messages": [*turn.messages, {"role": "user", "content": CHECK}], "max_new_tokens": 4, "temperature": 0.0}
    content = (turn.completion.text or "").strip().lower().startswith("yes")
    if content or turn.number > 2 * MAX_CORRECTIONS:
        return None
    return [*turn.messages, {"role": "user", "content": CORRECT}]


def run(options: Sequence[str] = (), questions: Sequence[str] = QUESTIONS) -> pl.DataFrame:
    """The last answer to each question, and the number of corrections."""
    chats = [{"messages": [{"role": "user", "content": text}]} for text in questions]
    with batchspec.Engine([*OPTIONS, *options]) as engine:
        turns = engine.converse(chats, next_turn)
    answers = turns.filter(pl.col("turn") % 2 == 0).group_by("row_index", maintain_order=True).last()
    return answers.with_columns(corrections=pl.col("turn") // 2)


if __name__ == "__main__":
    found = script(run, __doc__)
    with pl.Config(fmt_str_lengths=400, tbl_width_chars=120):
        print(found.select("corrections", "completion"))
