"""What features of rows ask of the device between two launches: plain host data, a part of a step that every rank executes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchspec.automata.token_automaton import TokenSymbols
from batchspec.batch.automata import AutomatonUpload, ConstraintOffsets, StatesUpload
from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.images import RowPixels

RuleVocabulary = TokenSymbols
"""What rules of logits read of the vocabulary. Every rank has it before the first commands."""


@dataclass(frozen=True, slots=True)
class RowCommands:
    """Executed in the order of the fields, each in its own order, when rows are in their slots and not live yet."""

    automata: tuple[AutomatonUpload, ...] = ()
    states: tuple[StatesUpload, ...] = ()
    constrain: tuple[tuple[int, ConstraintOffsets], ...] = ()
    """The row in this slot follows this automaton from this state on."""
    images: tuple[tuple[int, RowPixels], ...] = ()
    """The pixels of the images of the row in this slot."""

    def __bool__(self) -> bool:
        return bool(self.automata or self.states or self.constrain or self.images)

    @classmethod
    def joined(cls, commands: Iterable[RowCommands]) -> RowCommands:
        """All of them as one."""
        given = [one for one in commands if one]
        if len(given) < 2:
            return given[0] if given else NO_COMMANDS
        return cls(
            automata=tuple(one for own in given for one in own.automata),
            states=tuple(one for own in given for one in own.states),
            constrain=tuple(one for own in given for one in own.constrain),
            images=tuple(one for own in given for one in own.images),
        )

    def execute(self, rows: DeviceBatch) -> None:
        """In stream order."""
        if self.images:
            assert rows.images is not None, "the engine was made for requests without images"
            for slot, pixels in self.images:
                rows.images.place(slot, pixels)
        if not (self.automata or self.states or self.constrain):
            return
        assert rows.automata is not None, "the engine was made for requests without automata"
        if self.automata:
            rows.automata.upload(self.automata)
        for upload in self.states:
            rows.automata.upload_states(upload)
        if self.constrain:
            rows.constrain(self.constrain)


NO_COMMANDS = RowCommands()
