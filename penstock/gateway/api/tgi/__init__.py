"""The API of text-generation-inference, beside what it has in common with OpenAI."""
