"""Composition: puts the parts together into what a user runs."""
