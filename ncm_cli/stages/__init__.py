"""The stages: each reads files, computes, writes files, and knows no console."""
