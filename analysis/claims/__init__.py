"""Claims about sparse layers, each with its check and its verdict on a run."""
