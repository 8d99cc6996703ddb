"""Pages Findings, Compare and Export."""
