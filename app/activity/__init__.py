"""Pages Overview, Layers and Positions."""
