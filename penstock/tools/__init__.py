"""Function calling: call formats of model families, an incremental parser, grammars and prompts.

Nothing here knows an API's wire format; every endpoint with tools uses the same parts.
"""
