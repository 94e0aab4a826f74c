"""The test-domain bound of the paper: its terms, their intervals, and ``ncm bound``."""
