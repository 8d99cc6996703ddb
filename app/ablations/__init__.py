"""Page What matters: what the loss says when something is taken away."""
