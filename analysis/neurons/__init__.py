"""Which neurons fire, on what text, together with which, and what they write."""
