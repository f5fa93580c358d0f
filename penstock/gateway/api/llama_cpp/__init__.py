"""The API of llama.cpp's server, beside what it has in common with OpenAI."""
