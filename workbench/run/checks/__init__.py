"""Checks of a run, before anything is made of it: regular files, checksums, columns, ranges, counted tokens."""
