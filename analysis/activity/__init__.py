"""How many neurons fire: by layer, along the sequence, and beside the loss."""
