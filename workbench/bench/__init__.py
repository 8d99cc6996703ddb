"""`twell bench`: dense and sparse FFNs timed side by side, on the screen and in a table."""
