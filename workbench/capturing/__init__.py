"""Capture: forward passes of a model over text, and the counts that go from them to a run."""
