"""Make model folders offline, for laptops and tests, and check folders from elsewhere.

A setting that names a model takes any local folder in Hugging Face format.
"""
