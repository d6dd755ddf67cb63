"""Models to work with: ordinary Hugging Face folders, made offline.

Any local Hugging Face folder works wherever a model is named; these two are for laptops and
tests.
"""
