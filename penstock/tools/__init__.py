"""Function calling: the formats models write calls in, one incremental parser for them, grammars, prompts.

Nothing here knows an API's wire shapes; every endpoint that offers tools uses the same parts.
"""
