"""Declarations of tables that are many: those of summaries that take the means of the whole run."""
