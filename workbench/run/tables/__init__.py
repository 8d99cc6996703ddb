"""Declarations of tables beside a capture's own: benches, ablations, and summaries by the means of the whole run."""
