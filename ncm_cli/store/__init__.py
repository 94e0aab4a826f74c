"""Everything that is kept on disk: tables, feature stores, pair stores, probes, results."""
