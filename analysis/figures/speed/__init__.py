"""Figures of what sparsity is worth in time."""
