"""/v1/vector_stores: collections in the words of OpenAI's API. A vector store is a collection, its files are documents;
both APIs show the same."""
