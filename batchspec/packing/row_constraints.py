"""Which rows of a job may have a constraint on their answers, and the compiler of these constraints, if there are any."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.errors import BadRow, ConfigError
from batchspec.packing.constraints import COLUMNS, Constraint, Constraints, asked_by, check_constraints
from batchspec.packing.tool_choice import IGNORE, ToolChoice
from batchspec.tasks.registry import task_of
from batchspec.text.thinking import ThinkTokens
from batchspec.tool_calls.marks import CALL_MARKS

if TYPE_CHECKING:
    from batchspec.text.tokenizer import Tokenizer


class RowConstraints:
    """The constraints of a job's keys and columns, and of forced tool calls.

    end_ids    the tokens that end any row
    tool_form  name of the form in which the model writes tool calls; None: it is unknown
    shared     compiler to share with another admission of the same configuration and model; None: make one if it is needed
    Raises ConfigError if a key or a column asks for constraints that do not go together with the job or its model.
    """

    compiler: Constraints | None = None
    """Compiles what answers must match; None: no key and no column asks for structured output or forced calls."""

    def __init__(
        self, config: RunConfig, columns: ColumnMap, tokenizer: Tokenizer | None, *, vocab_size: int, think: ThinkTokens | None,
        end_ids: Collection[int], tool_form: str | None, shared: Constraints | None = None,
    ) -> None:
        self._config, self._tokenizer, self._vocab_size = config, tokenizer, vocab_size
        self._think, self._end_ids, self._marks = think, end_ids, CALL_MARKS.get(tool_form or "", ())
        self._why_no_calls = ""
        """Why no row can be forced to call a tool."""
        if (asked := asked_by(config, columns)) is not None:
            self._check(asked)
            self.compiler = shared or self._made()
        elif (column := columns.get("tool_choice")) is not None and task_of(config).decodes:
            try:
                self._check(f"column {column!r} (tool_choice)")
                self.compiler = shared or self._made()
            except ConfigError as error:
                self._why_no_calls = str(error)

    def expect(self, shared: Constraints | None = None) -> None:
        """Prepare for constraints that neither a key nor a column of this job asks for. Without effect if the tokenizer allows
        none. shared: as above."""
        if self.compiler is None and self._tokenizer is not None and task_of(self._config).decodes:
            with suppress(ConfigError):
                self.compiler = shared or self._made()

    def check_turn(self, values: Mapping[str, Any]) -> None:
        """Raises BadRow for a constraint of a later turn that the job or its model excludes. The check of the job does not find
        this if no key or column asks for a constraint."""
        asked = next((name for name in COLUMNS if values.get(name) is not None), None)
        if asked is None:
            return
        try:
            self._check(asked)
            if self.compiler is None:
                self._made()
        except ConfigError as error:
            raise BadRow("bad_parameter", str(error)) from None
        assert self.compiler is not None, "call `expect` before later turns are admitted"

    def of_row(self, row: Mapping[str, Any], choice: ToolChoice) -> Constraint | None:
        """What the row's answer must match. Raises BadRow."""
        if self.compiler is None:
            if choice.constraint is not None:
                raise BadRow("bad_parameter", f"tool_choice: {self._why_no_calls or 'this job has no constraints'}; {IGNORE}")
            return None
        own = self.compiler.of_row(row)
        return choice.constraint if own is None or choice.forces else own

    def _check(self, asked: str) -> None:
        check_constraints(self._config, asked, tokenizer=self._tokenizer, think=self._think, end_ids=self._end_ids)

    def _made(self) -> Constraints:
        assert self._tokenizer is not None
        return Constraints(
            self._config.decode, self._tokenizer, vocab_size=self._vocab_size, think=self._think, end_ids=self._end_ids,
            call_marks=self._marks,
        )
