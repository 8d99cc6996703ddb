"""Run code of ours in the place of parts of a model object, and give the object back as it was."""
