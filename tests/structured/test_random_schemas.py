"""Random schemas of nested keywords: what is written is valid, and no schema is impossible for which a valid value is known."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import Draft202012Validator, validator_for

from batchspec.process.refusals import is_panic
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.regular import Impossible, TooLarge
from tests.structured.random_schemas import RandomSchemas
from tests.structured.written_values import MAX_FORMS, Written, forms

NUM_VALUES, NUM_TEXTS = 60, 8


def validator(schema: Any) -> Any:
    """Of the declared draft, with its formats. Raises SchemaError."""
    draft = validator_for(schema, default=Draft202012Validator)
    draft.check_schema(schema)
    return draft(schema, format_checker=draft.FORMAT_CHECKER)


def check(seed: int) -> Counter[str]:
    """What became of one schema, and how many of the valid values that are known can be written."""
    random = RandomSchemas(seed)
    schema = random.document()
    try:
        draft = validator(schema)
        values = random.values(schema, NUM_VALUES)
        valid = [value for value in values if draft.is_valid(value)]
    except jsonschema.SchemaError:
        return Counter(["not a schema of its draft"])
    except BaseException as error:
        if not isinstance(error, RecursionError) and not is_panic(error):  # a panic of jsonschema's maps, at the stack's end
            raise
        return Counter(["refers to itself at once"])
    try:
        written = Written(schema)
    except Impossible:
        assert not valid, f"seed {seed}: {json.dumps(valid[0])} is valid by {json.dumps(schema)}"
        return Counter(["impossible"])
    except (BadSchema, TooLarge) as error:
        return Counter(["refused" if isinstance(error, BadSchema) else "too large"])
    for text in written.texts(NUM_TEXTS, seed):
        assert draft.is_valid(json.loads(text)), f"seed {seed}: {text} is not valid by {json.dumps(schema)}"
    for value in values:
        accepted = [text for text in itertools.islice(forms(value), MAX_FORMS) if written.accepts(text)]
        assert all(draft.is_valid(json.loads(text)) for text in accepted), f"seed {seed}: {accepted} by {json.dumps(schema)}"
    counts = Counter("valid value written" if written.writes(value) else "valid value not written" for value in valid)
    return counts + Counter(["compiled"])


def check_all(seeds: range) -> Counter[str]:
    found = Counter[str]()
    for seed in seeds:
        try:
            found += check(seed)
        except (TooLarge, RecursionError) as error:  # a state of the lazy automaton, or a value that a validator never finishes
            found += Counter([f"not finished: {type(error).__name__}"])
    return found


@pytest.mark.second
def test_random_schemas_are_written_validly_or_refused() -> None:
    found = check_all(range(60))
    assert found["compiled"] > 20
    assert found["impossible"] < found["compiled"]
    assert found["valid value written"] > found["valid value not written"]


@pytest.mark.slow
def test_many_random_schemas_are_written_validly_or_refused() -> None:
    found = check_all(range(5_000))
    print(json.dumps(found, indent=1))
    assert found["compiled"] > 2_000
