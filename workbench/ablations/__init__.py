"""The change of the loss when something is taken away: conditions, forward passes, and the tables of a study."""
