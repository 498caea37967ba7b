"""A tool loop: the model may ask for a calculation, gets its result, and goes on, four times at most.

    python jobs/examples/tool_loop.py [model.path=MODEL] [any other key of a job]

The protocol is plain text, so that it works with any chat template. A template with tools takes a column `tools`; the calls are
then in `turn.messages[-1]["tool_calls"]`, and a message {"role": "tool", "tool_call_id": ..., "content": ...} brings each result.
"""

import ast
import operator
import re
from collections.abc import Sequence
from typing import Any

import polars as pl

import batchspec
from batchspec.cli import script
from batchspec.warm.conversations import Turn

OPTIONS = ["model.path=smollm2-135m", "model.max_len=1024", "decode.max_new_tokens=96"]
SYSTEM = "You solve problems step by step. To calculate, write calc(EXPRESSION) and stop; you are told the result."
QUESTIONS = [
    "A box holds 24 eggs. How many eggs are in 17 boxes?",
    "Ann has 91 marbles and gives 7 friends the same number. How many?",
]
CALL = re.compile(r"calc\(([^()]*)\)")
MAX_CALLS = 4
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(text: str) -> str:
    """The value of + - * / over numbers, as text, or what is wrong with it."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError("only numbers and + - * / are allowed")

    try:
        return f"{value(ast.parse(text.strip(), mode='eval').body):g}"
    except (SyntaxError, ValueError, ArithmeticError) as error:
        return f"an error: {error}"


def next_turn(turn: Turn) -> list[Any] | None:
    """The chat with the tool's result, or None where the answer asks for no tool."""
    call = CALL.search(turn.completion.text or "")
    if call is None or turn.number == MAX_CALLS:
        return None
    return [*turn.messages, {"role": "user", "content": f"calc({call[1]}) is {calculate(call[1])}. Go on."}]


def run(options: Sequence[str] = (), questions: Sequence[str] = QUESTIONS) -> pl.DataFrame:
    """The last turn of each conversation."""
    chats = [{"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]} for text in questions]
    with batchspec.Engine([*OPTIONS, *options]) as engine:
        turns = engine.converse(chats, next_turn, threads=4)
    return turns.group_by("row_index", maintain_order=True).last()


if __name__ == "__main__":
    found = script(run, __doc__)
    with pl.Config(fmt_str_lengths=400, tbl_width_chars=120):
        print(found.select("turn", "completion"))
