"""The formats of JSON Schema as regular expressions: every text is valid by the format's RFC, not every valid text is written.

Names and addresses are in ASCII. Left out are leap seconds, years before 1000, IPv6 addresses in URIs, quoted local parts of
e-mail addresses, and labels of host names with `--` as third and fourth character: of these only valid Punycode after `xn--` is
allowed (RFC 5890, 2.3.1).
Sources: RFC 3339 (date, time, duration), 5321 (email), 1123 and 5890 (hostname), 3986 (uri), 4291 (ipv6), 6570 (uri-template),
6901 (json-pointer).
"""

from __future__ import annotations

_MONTH_DAY = "((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_LEAP_YEAR = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|(1[26]|[2468][048]|[3579][26])00)"
_DATE = f"([1-9][0-9]{{3}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = "(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9]))"
_OF_TIME = "T([0-9]{1,4}H([0-9]{1,4}M([0-9]{1,4}S)?)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S)"
_OF_DATE = "([0-9]{1,4}Y([0-9]{1,4}M([0-9]{1,4}D)?)?|[0-9]{1,4}M([0-9]{1,4}D)?|[0-9]{1,4}D)"

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_SHORTENED = [f"({_GROUP}(:{_GROUP}){{{count - 1}}})?::({_GROUP}(:{_GROUP}){{0,{6 - count}}})?" for count in range(1, 7)]
_IPV6 = "|".join([f"({_GROUP}:){{7}}{_GROUP}", *_SHORTENED, f"({_GROUP}:){{7}}:", f"::{_GROUP}(:{_GROUP}){{6}}"])


def _label(most: int, chars: str = "A-Za-z0-9") -> str:
    """A label of a host name, of at most so many characters."""
    one, any_ = f"[{chars}]", f"[{chars}-]"
    return f"{one}({any_}{{0,2}}{one}|{any_}({one}{any_}|-{one}){any_}{{0,{most - 5}}}{one})?"


def _hostname(chars: str) -> str:
    """At most 253 characters: few long labels or several short ones."""
    long, short = _label(63, chars), _label(30, chars)
    return f"(({long}\\.){{0,2}}{long}|({short}\\.){{3,7}}{short})"


_DOMAIN = f"((({_label(63)})\\.){{1,2}}|(({_label(30)})\\.){{3,5}})[A-Za-z]{{2,20}}"
_LOCAL = "(A{1,64}|A{1,20}(\\.A{1,20}){1,2}|A{1,10}(\\.A{1,10}){3,4})".replace("A", "[A-Za-z0-9_+-]")
_EMAIL = f"{_LOCAL}@{_DOMAIN}"

_SOME = "-A-Za-z0-9._~!$&'()*+,;="
_NAME, _PATH, _QUERY = (f"([{_SOME}{more}]|%[0-9A-Fa-f]{{2}})" for more in ("@", ":@", ":@/?"))
_PORT = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[0-9]{1,4})"
_AUTHORITY = f"(([{_SOME}:]|%[0-9A-Fa-f]{{2}})+@)?[A-Za-z0-9]([A-Za-z0-9._~-]|%[0-9A-Fa-f]{{2}})*(:{_PORT})?"
_AFTER_PATH = f"(\\?{_QUERY}*)?(#{_QUERY}*)?"
_URI = f"[a-z][a-z0-9+.-]{{1,20}}:(//({_AUTHORITY}|/{_PATH}+)|{_PATH}+)(/{_PATH}*)*{_AFTER_PATH}"
_RELATIVE = f"(/({_PATH}+(/{_PATH}*)*)?|{_NAME}+(/{_PATH}*)*){_AFTER_PATH}|\\?{_QUERY}*(#{_QUERY}*)?|#{_QUERY}*"
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*(\\.[A-Za-z0-9_]+)*(:[1-9][0-9]{0,2}|\\*)?"
_TEMPLATE = f"([A-Za-z0-9._~:/?#@!$&()*+,;=-]|%[0-9A-Fa-f]{{2}}|\\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\\}})*"
_POINTER = "(/([A-Za-z0-9._-]|~[01])*)*"

FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_OF_DATE}({_OF_TIME})?|{_OF_TIME}|[0-9]{{1,4}}W)",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": f"({_OCTET}\\.){{3}}{_OCTET}", "ipv6": _IPV6,
    "email": _EMAIL, "idn-email": _EMAIL, "hostname": _hostname("A-Za-z0-9"), "idn-hostname": _hostname("a-z0-9"),
    "uri": _URI, "iri": _URI, "uri-reference": f"{_URI}|{_RELATIVE}", "iri-reference": f"{_URI}|{_RELATIVE}",
    "uri-template": _TEMPLATE,
    # Some validators take a zero before another digit for a leading one.
    "json-pointer": _POINTER, "relative-json-pointer": f"[1-9]{{0,3}}[0-9](#|{_POINTER})",
    "regex": r"\^?(([A-Za-z0-9 _-]|\\[.dws]|\[a-z\]|\[A-Z\]|\[0-9\])[*+?]?)*\$?",
}
"""Formats -> the texts that are written for them. Other names are not restricted."""
