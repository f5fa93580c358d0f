"""Forms with files (`multipart/form-data`), parsed as a whole: the size of the body is limited before."""

from __future__ import annotations

from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.protocol.errors import InvalidRequest

MOST_FIELDS = 32
FORM_ROOM = 64 * 1024
"""Bytes that a form may have besides its file."""


@dataclass(slots=True)
class Field:
    """One part of a form. `filename` is empty when it is not a file."""

    name: str
    filename: str
    content: bytes
    media_type: str = ""
    """As the client said."""


@dataclass(slots=True)
class _Reader:
    """Collects the fields that the parser finds."""

    fields: list[Field] = field(default_factory=list)
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _name: bytearray = field(default_factory=bytearray)
    _value: bytearray = field(default_factory=bytearray)
    _content: list[bytes] = field(default_factory=list)

    def begin(self) -> None:
        if len(self.fields) >= MOST_FIELDS:
            raise InvalidRequest(f"The form has more than {MOST_FIELDS} fields.")
        self._headers, self._content = {}, []

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def data(self, data: bytes, start: int, end: int) -> None:
        self._content.append(data[start:end])

    def end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name, filename = (options.get(key, b"").decode("utf-8", "replace") for key in (b"name", b"filename"))
        kind = self._headers.get(b"content-type", b"").decode("latin-1")
        self.fields.append(Field(name, filename, b"".join(self._content), kind))


def read_form(content_type: bytes, body: bytes) -> dict[str, Field]:
    """The fields of a form by name. Raises `InvalidRequest` if it is malformed, or a name is repeated."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise InvalidRequest("A file is sent as a form: `content-type: multipart/form-data` with a boundary.")
    reader = _Reader()
    try:
        parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": reader.begin,
                "on_header_field": reader.header_name,
                "on_header_value": reader.header_value,
                "on_header_end": reader.header_end,
                "on_part_data": reader.data,
                "on_part_end": reader.end,
            },
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:  # also of the constructor: a long boundary
        raise InvalidRequest(f"The form cannot be read: {error}.") from None
    fields: dict[str, Field] = {}
    for found in reader.fields:
        if found.name in fields:
            raise InvalidRequest(f"The form has `{found.name[:64]}` twice; send one.", param=found.name[:64])
        fields[found.name] = found
    return fields
