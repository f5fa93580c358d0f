"""Readers that extract structured text from documents: plain text, Markdown, HTML and PDF."""

from penstock.knowledge.readers.blocks import Block, Extracted
from penstock.knowledge.readers.media import MEDIA_TYPES, decoded, media_type_of, read

__all__ = ["MEDIA_TYPES", "Block", "Extracted", "decoded", "media_type_of", "read"]
