"""Checks of a run, before anything is made of it: regular files, checksums, declared columns, ranges, counted tokens."""
