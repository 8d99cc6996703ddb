"""Files for other tools: tables, notebooks, one HTML page, and the figures in them."""
