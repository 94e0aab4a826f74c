"""From image files to rows of a feature store: decoding, encoders, augmentations, and ``ncm embed``."""
