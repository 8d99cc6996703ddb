"""A small figure for each claim: the evidence that its verdict rests on."""
