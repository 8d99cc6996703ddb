"""What ships with the package: the demo model, its passages, a recorded run. Reached through importlib.resources."""
