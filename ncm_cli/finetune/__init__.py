"""Networks trained end to end, with pairs as a penalty."""
