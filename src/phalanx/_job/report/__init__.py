"""Turn what a run has recorded into findings, pictures and a page."""
