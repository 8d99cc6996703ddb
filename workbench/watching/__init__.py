"""Watch: the counts of a capture, from code of your own."""
