"""Work with a model that a page starts: capturing the user's own text, and measuring; in processes of their own.
And the timings of a capture that runs elsewhere, as they come."""
