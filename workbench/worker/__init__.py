"""The worker: a process that keeps a model loaded, and reads texts with it for the dashboard."""
