"""Forms with files: whatever a client sends is read, or refused with a reason."""

from __future__ import annotations

import contextlib
import random

import pytest

from penstock.gateway.app.multipart import read_form
from penstock.protocol.errors import InvalidRequest

KIND = b"multipart/form-data; boundary="
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\ncontent-type: text/plain\r\n\r\nhi\r\n'
    b"--b--\r\n"
)
PIECES = (
    *(b"--b", b"\r\n", b"\n", b"\r", b"--", b":", b";", b'"', b"\\", b"\0", b"\xff", b"name", b"filename*=utf-8''%zz"),
    *(b"content-disposition", b"x" * 300, b"=", b" ", b"form-data"),
)


def test_fields_and_files() -> None:
    form = read_form(KIND + b"b", FORM)
    assert form["purpose"].content == b"batch" and form["purpose"].filename == ""
    assert (form["file"].filename, form["file"].content, form["file"].media_type) == ("a.txt", b"hi", "text/plain")


@pytest.mark.parametrize(
    "content_type", [b"", b"text/plain", b"multipart/form-data", KIND, KIND + b'"', KIND + b"a" * 500, KIND + b"\xff"]
)
def test_what_is_no_form_is_refused(content_type: bytes) -> None:
    with pytest.raises(InvalidRequest, match="form"):
        read_form(content_type, FORM)


def test_a_field_is_given_once() -> None:
    twice = FORM.replace(b"--b--", b"--b" + FORM.split(b"--b")[2] + b"--b--")
    with pytest.raises(InvalidRequest, match="`file` twice") as refused:
        read_form(KIND + b"b", twice)
    assert refused.value.param == "file"


def test_mutated_forms_are_read_or_refused() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        header, body = KIND + b"b", FORM
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            body = body[:at] + rng.choice(PIECES) + body[at + rng.choice((0, 1, 5)) :]
        if rng.random() < 0.3:
            at = rng.randrange(len(header))
            header = header[:at] + rng.choice(PIECES) + header[at + rng.choice((0, 1, 5)) :]
        with contextlib.suppress(InvalidRequest):
            read_form(header, body)
