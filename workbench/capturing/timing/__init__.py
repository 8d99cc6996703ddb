"""Time a capture: every sparse call where it runs, and dense ones beside it now and then."""
