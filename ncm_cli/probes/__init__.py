"""Linear probes: what a fit is made from, the rank path, the choice and its verdict; eval and predict."""
