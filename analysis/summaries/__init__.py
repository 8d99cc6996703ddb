"""Summaries: tables derived from a run's parts, built once, refreshed as parts come, and read."""
