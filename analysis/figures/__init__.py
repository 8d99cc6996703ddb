"""Figures: the dashboard's own, as functions of a run or of a table."""
