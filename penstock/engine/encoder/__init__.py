"""Encoder models (BERT): texts to vectors and scores, batched, in an engine process of their own."""
