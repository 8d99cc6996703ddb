"""A run in one document: a notebook that has run, or an HTML page that needs nothing else."""
