"""Vectors for texts: the encoder model, its tokenizer, and the engine that batches inputs of many requests."""
