"""Drafts from n-grams: the history of recent samples, and its use on V1 and V2."""
