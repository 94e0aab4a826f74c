"""Which rows are paired, and what speaks for and against the pairs."""
