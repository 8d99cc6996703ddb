"""The figures of page What matters."""
