"""Make model folders offline, for laptops and tests.

A setting that names a model takes any local folder in Hugging Face format.
"""
