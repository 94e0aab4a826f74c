"""The mathematics, on plain arrays and tensors."""
