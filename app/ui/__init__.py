"""Parts that all pages share: address, run chooser, queries, headings, formatting, figures' style."""
