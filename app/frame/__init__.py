"""The frame around every page: the bar with its links, the search and the run chooser."""
