"""Configuration to objects: the only package that knows every backend."""
