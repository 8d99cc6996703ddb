"""A run on disk: its schema, its manifest, how it is written and how it is read."""
