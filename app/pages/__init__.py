"""One page a file, one question a page."""
