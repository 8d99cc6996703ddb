"""Text: from a source's bytes to documents, token sequences and batches."""
