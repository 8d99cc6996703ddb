"""Pages Tokens and Token."""
