"""Check a run whole: every row of its parts, and its summaries against them (`twell check`)."""
