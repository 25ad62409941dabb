"""PDF files for tests, ordinary and hostile ones, made from bytes."""

from __future__ import annotations

import io
import zlib


def pdf_of(*objects: bytes, root: int = 1) -> bytes:
    """Return a PDF with the objects, whose numbers start at 1."""
    file = io.BytesIO()
    file.write(b"%PDF-1.7\n")
    offsets = []
    for number, each in enumerate(objects, 1):
        offsets.append(file.tell())
        file.write(b"%d 0 obj\n%s\nendobj\n" % (number, each))
    begin, size = file.tell(), len(objects) + 1
    file.write(b"xref\n0 %d\n0000000000 65535 f \n" % size)
    file.write(b"".join(b"%010d 00000 n \n" % offset for offset in offsets))
    trailer = b"trailer\n<< /Size %d /Root %d 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    file.write(trailer % (size, root, begin))
    return file.getvalue()


def stream(content: bytes, *, layers: int = 0) -> bytes:
    """Return a stream object. Its content is compressed `layers` times."""
    for _ in range(layers):
        content = zlib.compress(content, 9)
    names = b" ".join([b"/FlateDecode"] * layers)
    head = b"<< /Length %d /Filter [%s] >>" % (len(content), names)
    return b"%s\nstream\n%s\nendstream" % (head, content)


def pages_of(*contents: bytes) -> bytes:
    """Return a PDF with one page for each content stream."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(contents)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, content in enumerate(contents):
        page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
        fonts = b"/Resources << /Font << /F1 3 0 R >> >> >>"
        objects += [page % (5 + 2 * i) + fonts, content]
    return pdf_of(*objects)


def text_pdf(*pages: str) -> bytes:
    """Return a PDF with a line of ASCII text on each page."""
    shown = [b"BT /F1 12 Tf 72 720 Td (%s) Tj ET" % text.encode() for text in pages]
    return pages_of(*map(stream, shown))


def encrypted_pdf(text: str, password: str) -> bytes:
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(text_pdf(text))))
    writer.encrypt(password, "owner", algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def slow_pdf() -> bytes:
    """Return a small PDF whose pages take minutes to read."""
    busy = stream(b"BT /F1 12 Tf " + b"(a) Tj " * 300_000 + b"ET", layers=2)
    return pages_of(*[busy] * 50)


def memory_pdf() -> bytes:
    """Return a small PDF whose page needs tens of megabytes."""
    return pages_of(stream(b" " * 8_000_000 + b"BT /F1 12 Tf (small) Tj ET", layers=2))


def bomb_pdf() -> bytes:
    """Return a small PDF with a stream that is larger than pypdf's limit."""
    return pages_of(stream(b" " * 80_000_000, layers=2))


def cyclic_pdf() -> bytes:
    """Return a PDF whose page tree contains itself."""
    return pdf_of(
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 2 /Parent 2 0 R >>",
    )
