"""What the figures of all pages share: their style, and small multiples."""
