"""The methods that probes are compared with: objectives, the batched trainer, dfr, leace; ``ncm sweep``."""
