"""EAGLE-3: config, model and loss."""
