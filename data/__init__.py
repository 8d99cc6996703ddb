"""What ships with the package: demo model, passages, recorded runs, studies. Reached through importlib.resources."""
