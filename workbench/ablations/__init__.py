"""What the loss says when something is taken away: conditions, forward passes, and the tables of a study."""
