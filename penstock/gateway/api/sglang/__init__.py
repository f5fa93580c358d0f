"""The API of SGLang, beside what it has in common with OpenAI."""
