"""The JSON-Schema-Test-Suite: no text of an invalid instance is accepted, and no schema with a valid one is impossible.

    JSON_SCHEMA_TEST_SUITE=FOLDER python -m pytest -s tests/structured/test_schema_suite.py

FOLDER is a clone of github.com/json-schema-org/JSON-Schema-Test-Suite; without it the tests are skipped. -s prints the counts of
each draft.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.regular import Impossible, TooLarge
from tests.structured.written_values import MAX_FORMS, Written, forms

SUITE = os.environ.get("JSON_SCHEMA_TEST_SUITE")
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#", "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#", "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
NOT_CHECKED = "content.json"
"""contentMediaType and contentEncoding are annotations, which draft-07 lets a validator check."""


def cases(draft: str) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """A name, a schema that declares its draft, and its instances."""
    for file in sorted(Path(str(SUITE), "tests", draft).rglob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")) if file.name != NOT_CHECKED else ():
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            yield f"{file.relative_to(str(SUITE))}: {case['description']}", schema, case["tests"]


def texts_of_the_same(value: Any) -> list[str]:
    """Not those with 1 for 1.0, which draft-04 takes for another value."""
    same = json.dumps(value, sort_keys=True)
    return [text for text in itertools.islice(forms(value), MAX_FORMS) if json.dumps(json.loads(text), sort_keys=True) == same]


@pytest.mark.skipif(SUITE is None, reason="JSON_SCHEMA_TEST_SUITE names no clone of the suite")
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_suite_of_a_draft(draft: str) -> None:
    counts, wrong = Counter[str](), list[str]()
    for name, schema, instances in cases(draft):
        valid = [one["data"] for one in instances if one["valid"]]
        try:
            written = Written(schema)
        except Impossible:
            counts["impossible"] += 1
            wrong += [f"{name}: impossible, but {json.dumps(value)} is valid" for value in valid[:1]]
            continue
        except (BadSchema, TooLarge) as error:
            counts["refused" if isinstance(error, BadSchema) else "too large"] += 1
            continue
        counts["compiled"] += 1
        counts["valid instances written"] += sum(map(written.writes, valid))
        counts["valid instances of compiled schemas"] += len(valid)
        for value in (one["data"] for one in instances if not one["valid"]):
            wrong += [f"{name}: {text} is accepted" for text in texts_of_the_same(value) if written.accepts(text)]
    print(draft, dict(counts))
    assert not wrong
    assert counts["compiled"] > 100
