"""Page Text."""
