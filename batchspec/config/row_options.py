"""The options of a row: what columns of the input set for one row, besides its id and its prompt.

Most take the place of a key of the job and are declared beside it (`Key.column`); those without a key are declared here. What
their values mean is written where rows are admitted (`packing/row_settings.py` and its neighbours).
"""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.config.key import ANSWERS, CHATS, Column, Key
from batchspec.config.schema import KEYS

WITHOUT_KEY: dict[str, Key] = {
    "response_format": Key(applies_to=ANSWERS, column=Column("json")),
    "tools": Key(applies_to=CHATS, column=Column("tools")),
    "tool_choice": Key(applies_to=CHATS | ANSWERS, column=Column("object", words="string, JSON string or struct")),
    "parallel_tool_calls": Key(applies_to=CHATS | ANSWERS, column=Column("boolean")),
    "synthetic_len": Key(
        low=1, advice="leave it null for a row that ends by itself", applies_to=ANSWERS, column=Column("integer")
    ),
}
"""Columns that no key of the job does the same as, and what is declared of them."""


@dataclass(frozen=True, slots=True)
class RowOption:
    """One column with which a row sets an option."""

    key: str
    """The job's key, which counts for rows where the column is null; empty: there is none."""
    declared: Key
    column: Column

    @property
    def is_number(self) -> bool:
        return self.column.type in ("integer", "number")

    @property
    def is_whole(self) -> bool:
        return self.column.type == "integer"


ROW_OPTIONS: dict[str, RowOption] = {
    declared.column.name or key.rpartition(".")[2]: RowOption(key if key in KEYS else "", declared, declared.column)
    for key, declared in (KEYS | WITHOUT_KEY).items()
    if declared.column is not None
}
"""Name of the column -> the option."""
