"""Shared test cases: masks and score mods that people use, and a float64 dense reference."""
