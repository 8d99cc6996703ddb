"""The server: starting it, what is loaded beforehand, and answers computed before they are asked."""
