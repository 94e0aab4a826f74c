"""Which results are repetitions of one another, and the tables and figures of ``ncm report``."""
