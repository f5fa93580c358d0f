"""The usage that answers of each API family report."""

from __future__ import annotations

import pytest

from penstock.gateway.batches.usage import NONE, Usage, usage_of


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (
            b'{"usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}, '
            b'"completion_tokens_details": {"reasoning_tokens": 3}}}',
            Usage(9, 8, 4, 3),
        ),
        (
            b'{"usage": {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 8, '
            b'"cache_write_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 3}}}',
            Usage(9, 8, 4, 3),
        ),
        (b'{"usage": {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 4}}', Usage(9, 8, 4)),
        (b'{"usage": {"prompt_tokens": 5, "total_tokens": 5}}', Usage(5)),
        (b'{"error": {}}', NONE),
        (b'{"usage": null}', NONE),
        (b"", NONE),
    ],
)
def test_all_families(body: bytes, usage: Usage) -> None:
    assert usage_of(body) == usage
