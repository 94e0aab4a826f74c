"""Builders of data sets."""
