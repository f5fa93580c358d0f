"""The HTTP side: validation, text, streaming, errors. JSON and templates live here and nowhere below."""
