"""Models: checkpoints, families, weights, and the FFNs that are replaced by instrumented ones."""
