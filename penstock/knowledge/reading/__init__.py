"""Bytes of a document to text with structure: plain text, Markdown, HTML and PDF, each in a file of its own."""

from penstock.knowledge.reading.blocks import Block, Extracted
from penstock.knowledge.reading.media import MEDIA_TYPES, media_type_of, read

__all__ = ["MEDIA_TYPES", "Block", "Extracted", "media_type_of", "read"]
