"""PDFs of a few objects: pages of text or of coloured rectangles, of any size and turn, filled forms, passwords."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

A4 = (595.0, 842.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of lines of Helvetica on a coloured ground."""

    lines: tuple[str, ...] = ()
    size: tuple[float, float] = A4
    colour: tuple[float, float, float] = (1.0, 1.0, 1.0)
    turn: int = 0
    """Degrees clockwise."""
    form: str = ""
    """Text of a form's field at the top left."""


def make_pdf(pages: Sequence[Page], *, locked: bool = False, without_page: int | None = None, count: int | None = None) -> bytes:
    """locked: it needs a password. without_page: index of a page whose object is missing. count: what its page tree says of the
    number of pages; None: the truth."""
    objects = list[bytes]([b"", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"])
    kids, fields = list[int](), list[int]()

    def add(data: bytes) -> int:
        objects.append(data)
        return len(objects)

    def stream(head: bytes, data: bytes) -> int:
        return add(b"<<%s/Length %d>>stream\n%s\nendstream" % (head, len(data), data))

    for page in pages:
        width, height = page.size
        text = b" ".join(b"(%s) '" % line.encode() for line in page.lines)
        ground = b"%g %g %g rg 0 0 %g %g re f 0 g " % (*page.colour, width, height)
        content = stream(b"", b"%sBT /F 20 Tf 24 TL 40 %g Td %s ET" % (ground, height - 40, text))
        extra = b"/Rotate %d" % page.turn if page.turn else b""
        if page.form:
            box = b"/BBox[0 0 200 40]/Resources<</Font<</F 3 0 R>>>>"
            shown = b"1 0 0 rg 0 0 200 40 re f BT /F 20 Tf 4 10 Td (%s) Tj ET" % page.form.encode()
            drawn = stream(b"/Type/XObject/Subtype/Form" + box, shown)
            field = b"/FT/Tx/T(field)/V(%s)/DA(/F 20 Tf)/Rect[40 %g 240 %g]" % (page.form.encode(), height - 80, height - 40)
            fields.append(add(b"<</Type/Annot/Subtype/Widget/F 4%s/AP<</N %d 0 R>>>>" % (field, drawn)))
            extra += b"/Annots[%d 0 R]" % fields[-1]
        head = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %g %g]/Resources<</Font<</F 3 0 R>>>>" % page.size
        kids.append(add(b"%s%s/Contents %d 0 R>>" % (head, extra, content)))
    form = b"/AcroForm<</Fields[%s]/DR<</Font<</F 3 0 R>>>>>>" % b" ".join(b"%d 0 R" % one for one in fields) if fields else b""
    objects[0] = b"<</Type/Catalog/Pages 2 0 R%s>>" % form
    objects[1] = b"<</Type/Pages/Count %d/Kids[%s]>>" % (count or len(kids), b" ".join(b"%d 0 R" % kid for kid in kids))
    lock = b""
    if locked:
        words = b"/O<%s>/U<%s>" % (b"11" * 32, b"22" * 32)
        lock = b"/Encrypt %d 0 R/ID[<00><00>]" % add(b"<</Filter/Standard/V 1/R 2/P -4%s>>" % words)
    if without_page is not None:
        objects[kids[without_page] - 1] = b"null"
    return _written(objects, lock)


def _written(objects: Sequence[bytes], more: bytes) -> bytes:
    out, offsets = bytearray(b"%PDF-1.4\n"), list[int]()
    for number, data in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj %s endobj\n" % (number, data)
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, more, table)
    return bytes(out)
