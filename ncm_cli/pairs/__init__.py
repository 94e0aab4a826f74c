"""Makes pairs of rows, and diagnoses them."""
