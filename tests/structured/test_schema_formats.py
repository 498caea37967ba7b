"""The formats of JSON Schema: what is written is valid by the RFC of each, and usual texts can be written."""

from __future__ import annotations

import json
import re

import pytest
from jsonschema.validators import Draft202012Validator

from batchspec.structured.json_schema.formats import FORMATS
from tests.structured.test_structured import matches, samples, schema_dfa

LONG = "a" * 63
TEXTS = {
    "date": ("2024-02-29 2000-02-29 2023-12-31", "2023-02-29 1900-02-29 2024-04-31 24-01-01"),
    "time": ("23:59:59Z 10:20:30.123456+05:30", "24:00:00Z 10:20:30 10:20Z"),
    "date-time": ("2024-02-29T10:20:30Z", "2024-02-29 2023-02-29T10:20:30Z"),
    "duration": ("P1Y2M3DT4H5M6S P2M P3W PT5M P1DT1H", "P PT P1Y2D P1WT1H PT1H1S P1D2M"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000"),
    "ipv4": ("127.0.0.1 255.255.255.255", "256.0.0.1 1.2.3 01.2.3.4"),
    "ipv6": (
        ":: ::1 2001:db8::8:800:200C:417A 1:2:3:4:5:6:7:8 1:2:3:4:5:6:7:: ::2:3:4:5:6:7:8",
        "::: 1:2 1::2::3 1:2:3:4:5:6:7:8:9 12345::",
    ),
    "email": ("jo.do+x@mail.example.org j_k@a-b.co", "@a.bc a@ a@b .a@b.cd a..b@c.de a@xn--9.de " + "a" * 65 + "@b.cd"),
    "hostname": (
        f"localhost a.b-c.d8 {LONG}.{LONG}.com my-svc.ns.svc.cluster.local x--y",
        "-a a- a..b a. xn--X xn--nxasmq6b ab--cd A_b",
    ),
    "uri": (
        "https://u:p@a.example:8080/b/c?d=%20e#f file:///etc/x urn:isbn:0451 mailto:a@b.cd http://1.2.3.4:65535",
        "http://a:b/c http://a:65536 http://a:/%zz //a/b a/b http://a#b#c http://[1 http://2001:db8::1:7334:7",
    ),
    "uri-reference": ("/a/b ../c?d=e #f ?g ab:c http://a:1/ x", "1:a //a:b/ a#b#c %g"),
    "uri-template": ("http://a.bc/{id}/x{?q,page*}{#f:3} /{+path}", "{ {} {!a} {a:0} a}b 'x'"),
    "json-pointer": ("/a/0/~1~0 /", "a /~2 /~"), "relative-json-pointer": ("0 1/a 12#", "/a 01 -1 1a"),
    "regex": (r"^a\d*$ [a-z]+ x?", "( [ * a{2"),
}
"""By format: texts that can be written, and texts that cannot, divided by spaces."""
WIDER = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "iri-reference": "uri-reference"}
TEXTS |= {name: TEXTS[narrow] for name, narrow in WIDER.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_the_texts_of_a_format(name: str) -> None:
    dfa = schema_dfa({"type": "string", "format": name})
    right, wrong = TEXTS[name]
    assert [text for text in right.split(" ") if not matches(dfa, json.dumps(text).encode())] == []
    assert [text for text in wrong.split(" ") if matches(dfa, json.dumps(text).encode())] == []
    assert not matches(dfa, b'"a b"') or name == "regex"


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_for_a_format_is_valid(name: str) -> None:
    """By the packages that jsonschema asks, as far as they are installed."""
    for length in (20, 90, 300):
        for text in samples(schema_dfa({"type": "string", "format": name}), 40, seed=length, most_bytes=length):
            assert Draft202012Validator.FORMAT_CHECKER.conforms(json.loads(text), name), text


@pytest.mark.parametrize("name", ["hostname", "idn-hostname", "email", "idn-email"])
def test_names_of_hosts_have_the_lengths_and_labels_of_the_rfcs(name: str) -> None:
    found = [json.loads(text) for text in samples(schema_dfa({"type": "string", "format": name}), 60, most_bytes=400)]
    for local, _, host in (text.rpartition("@") for text in found):
        assert len(local) <= 64
        assert len(host) <= 253
        for label in host.split("."):
            assert re.fullmatch("(?!..--)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", label), host
    dfa = schema_dfa({"type": "string", "format": "hostname"})
    assert matches(dfa, f'"{".".join([LONG] * 3)}"'.encode())
    assert not matches(dfa, f'"{".".join([LONG] * 4)}"'.encode())
    assert not matches(dfa, f'"{LONG}a"'.encode())


@pytest.mark.parametrize(("name", "limit"), [("hostname", 253), ("idn-hostname", 253), ("email", 254)])
def test_the_longest_texts_of_hosts_are_within_the_limits(name: str, limit: int) -> None:
    dfa = schema_dfa({"type": "string", "format": name})
    reached = {dfa.starts[0]}
    for _ in range(limit + 3):  # with its quotes a text of the limit has two bytes more
        reached = {int(state) for one in reached for state in dfa.next[one].tolist() if state}
    assert not reached
