"""Measurements a user can repeat: workloads, runs side by side, tables, JSON and plots."""
