"""Work with a model that a page starts: own text and measurements, in processes of their own."""
