"""A PDF writer of a few lines, for tests: one paragraph per page."""

from __future__ import annotations

from collections.abc import Sequence


def make_pdf(pages: Sequence[str], letters: str = "") -> bytes:
    """`letters`: what the font says of its letters, as lines of a table `ToUnicode`."""
    count = len(pages)
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(count))
    said = f"/ToUnicode {4 + 2 * count} 0 R" if letters else ""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {count} >>",
        f"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica {said} >>",
    ]
    for i, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * i} 0 R >>"
        )
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    if letters:
        table = f"begincmap\n1 begincodespacerange\n<00> <FF>\nendcodespacerange\n{letters}\nendcmap"
        objects.append(f"<< /Length {len(table)} >>\nstream\n{table}\nendstream")
    out = b"%PDF-1.4\n"
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{offset:010d} 00000 n \n".encode() for offset in offsets)
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n".encode()
    return out
