"""Which tokens, words and classes of tokens fire many neurons, and where they stand."""
