"""Checks of a run's files, before anything is made of them: regular files, checksums, declared columns and ranges."""
