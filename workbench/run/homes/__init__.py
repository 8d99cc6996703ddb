"""What of a run lies outside its folder, and where on this machine: its summaries in a cache, its model."""
