"""Make model folders offline, for laptops and tests, and check those that others made.

A setting that names a model takes any local folder in Hugging Face format.
"""
