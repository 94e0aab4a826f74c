"""Image encoders and the one function that decodes images."""
