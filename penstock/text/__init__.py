"""Text: tokenizers, chat templates, incremental detokenization, stop strings. Used by the gateway; no torch."""

from penstock.text.chat_template import ChatTemplateError, TemplateTooHeavy
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.loader import load_text
from penstock.text.stop_strings import StopStrings
from penstock.text.text_model import TextModel

__all__ = ["ChatTemplateError", "IncrementalDetokenizer", "StopStrings", "TemplateTooHeavy", "TextModel", "load_text"]
