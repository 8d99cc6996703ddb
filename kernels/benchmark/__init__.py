"""Timing of FFN operations: what is run, on which inputs, in turns, and how errors are measured."""
